"""GS103: the writer is a module or functional with ``inplace=True``."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose.facts import Facts, renormalises
from gradsan.diagnose.levels import inner_frames
from gradsan.model import Diagnosis, Write

CODE = "GS103"
SLUG = "inplace_module"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a first write that came from inside ``torch.nn``'s modules or functionals."""
    first = facts.first
    if first is None or not is_inplace_flag(first):
        return None
    writer = module_name(first)
    return build.diagnosis(
        facts, CODE, SLUG, values={"writer": writer}, fixes=fixes.disable_inplace_module(facts, writer)
    )


def is_inplace_flag(write: Write) -> bool:
    """Whether an ``inplace=True`` made the write: an in-place operator called by torch's functionals or modules."""
    if write.kind not in ("inplace", "op") or not write.op.endswith("_") or renormalises(write):
        return False
    return any(_is_layer_code(frame.file) for frame in inner_frames(write.site))


def module_name(write: Write) -> str:
    """The class of the innermost module or the functional that wrote: ``ReLU``, ``dropout``."""
    for frame in reversed(inner_frames(write.site)):
        owner, _, method = frame.function.rpartition(".")
        if method == "forward" and owner:
            return owner.rpartition(".")[2]
    layers = [frame.function for frame in inner_frames(write.site) if _is_layer_code(frame.file)]
    return layers[0].rpartition(".")[2] if layers else write.op.rstrip("_")


def _is_layer_code(file: str) -> bool:
    path = file.replace("\\", "/")
    return path.endswith("/torch/nn/functional.py") or "/torch/nn/modules/" in path
