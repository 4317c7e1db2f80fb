"""The forward that the loss hangs on runs once more after the step, with the parameters as they are by then."""

from __future__ import annotations

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.rewrite.moving import run_again

_CAUSES = blocks.STEPPED | {"input_changed_between_passes", "statistics_updated"}


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Repeat the assignments between the save and the write on which the loss depends; else all it depends on."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    saved = next(iter(blocks.labels(diagnosis, "saved")), None)
    written = blocks.labels(diagnosis, "written")
    if used is None or not written or diagnosis.cause not in _CAUSES:
        return ()
    words = "recompute_forward" if diagnosis.cause in blocks.STEPPED else "recompute_after_change"
    found = run_again(
        None if saved is None else blocks.user_frames(saved),
        [blocks.user_frames(one) for one in written],
        blocks.user_frames(used),
    )
    return tuple(blocks.fix("recompute_forward", lines, words) for lines in found)
