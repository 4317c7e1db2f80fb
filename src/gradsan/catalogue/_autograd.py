"""Whether an exception is one of autograd's at all."""

from __future__ import annotations

from gradsan.catalogue._rows import place_raised, recognise

# How the version check's own message begins, which needs no row: what it means is for the causes to find out.
_VERSION_CHECK = "one of the variables needed for gradient computation has been modified by an inplace operation"


def is_of_autograd(error: BaseException) -> bool:
    """Whether ``error`` is the version check's or one that the catalogue knows."""
    if isinstance(error, RuntimeError) and str(error).startswith(_VERSION_CHECK):
        return True
    return recognise([kind.__name__ for kind in type(error).__mro__], str(error), place_raised(error)) is not None


def comes_from_autograd(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from (``raise TrainingFailed() from error``), is of autograd."""
    seen: set[int] = set()
    looked_at: BaseException | None = error
    while looked_at is not None and id(looked_at) not in seen:
        if is_of_autograd(looked_at):
            return True
        seen.add(id(looked_at))
        looked_at = looked_at.__cause__
    return False
