"""``gradsan fix --apply``: a question, the files, a run from disk, and everything back if that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from gradsan.launch.sentences import complain, write_to_stderr
from gradsan.model import Fix, Message
from gradsan.options import OptionsError
from gradsan.present._places import shown_path, working_directory
from gradsan.repair import Patch, apply_patch, dirty_files, is_implied
from gradsan.text import Language, say


class _StillFailsError(Exception):
    """The program, run again from disk, has a fault."""


def is_wanted(fix: Fix, number: int | None, *, asks: bool, language: Language) -> bool:
    """Whether ``fix`` may be written: asked for by its ``number``, or the best one (None), which keeps the training.

    A best fix that does not is written after a question on a terminal; unasked (``asks`` False) only where its change
    is the one that the cause implies.
    """
    if number is not None or fix.verification.training == "same":
        return True
    if not asks and (fix.meaning == "preserved" or is_implied(fix)):
        return True
    how = "?" if fix.how_changed is None else say(fix.how_changed, language)
    if asks and _is_answered(Message("fix.ask_changed", {"how": how}), language):
        return True
    complain(Message("fix.not_the_same", {"how": how, "number": 1}), language)
    return False


def apply_fix(
    patches: Sequence[Patch], number: int, is_well: Callable[[], bool], *, asks: bool, language: Language
) -> bool:
    """Write patch ``number`` (from 1); whether it stands. ``is_well`` runs the program as it then lies on disk.

    Where ``asks`` is true, files with changes that are not committed are only written if somebody agrees.

    Raises:
        OptionsError: where there is no such patch, or a file cannot be written; none has changed then.
    """
    if not 1 <= number <= len(patches):
        raise OptionsError(Message("fix.no_such_fix", {"number": number, "count": len(patches)}))
    patch = patches[number - 1]
    dirty = dirty_files(patch) if asks else ()
    if dirty and not _agreed(dirty, language):
        complain(Message("fix.left_alone"), language)
        return False
    complain(Message("fix.running_applied"), language)
    try:
        with apply_patch(patch):
            if not is_well():
                raise _StillFailsError
    except _StillFailsError:
        complain(Message("fix.restored"), language)
        return False
    except OSError as failure:
        raise OptionsError(Message("fix.cannot_write", {"reason": failure.strerror or str(failure)})) from None
    complain(Message("fix.applied", {"files": _shown(patch.files)}), language)
    return True


def is_agreed(what: Message, language: Language) -> bool:
    """Whether somebody at the terminal lets every trial do ``what`` cannot be kept in a scratch layer."""
    return bool(_is_answered(Message("fix.ask_uncovered", {"what": say(what, language)}), language))


def _shown(files: Iterable[str]) -> str:
    return ", ".join(shown_path(file, working_directory(None)) for file in sorted(files))


def _agreed(dirty: tuple[str, ...], language: Language) -> bool:
    question = Message("fix.ask_dirty", {"files": _shown(dirty)})
    is_agreed = _is_answered(question, language)
    if is_agreed is None:
        write_to_stderr(f"{say(question, language)}\n")
    return bool(is_agreed)


def _is_answered(question: Message, language: Language) -> bool | None:
    """Whether somebody at the terminal says yes; None where nobody can be asked."""
    if not sys.stdin or not sys.stdin.isatty():
        return None
    write_to_stderr(say(question, language))
    return sys.stdin.readline().strip().lower() in ("y", "yes")
