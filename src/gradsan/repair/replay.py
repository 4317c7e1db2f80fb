"""Reference run that candidates are held against, and whether the program computes the same when it is run again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradsan.model import Diagnosis
from gradsan.repair.trials.trial import Request, Trial

_TOLERANCE = 1e-6
"""Relative difference of losses up to which two runs computed the same: threads add up in any order."""

_ALLOWANCES = {
    "freed_state_carried_over": ("keep_graphs",),
    "forward_shared_by_two_backwards": ("keep_graphs",),
    "graph_built_once": ("keep_graphs",),
    "same_loss_twice": ("keep_graphs",),
    "out_requires_grad": ("record_out",),
    "one_of_several_views_written": ("single_views",),
    "unrecorded_view_written": ("record_views",),
    "view_base_written": ("single_views", "record_views"),
    "expanded_written": ("own_memory",),
    "compiled_overwritten": ("run_eagerly",),
    "gradient_overwritten": ("own_gradients",),
    "context_attribute": ("own_context",),
    "checkpoint_closure": ("without_checkpoint",),
    "saved_tensor_detached": ("release_gradients",),
    "gradient_reduced_twice": ("own_rank",),
    "gathered_anew": ("gathered_values",),
}
"""By the cause of a fault, what a run has to allow so that the program comes past it as it is written."""


def reference_for(request: Request, faults: Sequence[Diagnosis]) -> Request:
    """The request for the run whose gradients are right: healed, and with what PyTorch refuses carried out."""
    allowances = {name for fault in faults for name in _ALLOWANCES.get(fault.cause, ())}
    for fault in faults:
        if fault.cause == "leaf_written":
            first = next((fix.kind for fix in fault.fixes), "no_grad")
            is_new = first in ("out_of_place", "clone_before_mutation")
            allowances.add("renew_leaves" if is_new else "write_leaves")
    return replace(request, mode="heal", allowances=frozenset(allowances))


def was_refused(fault: Diagnosis) -> bool:
    """Whether there are no gradients of the program as it is written: PyTorch refused a statement, or they are NaN."""
    return fault.cause == "leaf_written" or fault.nonfinite is not None


def is_replayable(first: Trial, again: Trial) -> bool:
    """Whether both runs began the same backwards with the same losses, as far as healing cannot have changed them.

    A run that was stopped for its time tells nothing against it.
    """
    before, after = first.recording.begun, again.recording.begun
    if len(after) < len(before):
        return again.timed_out
    # What a silent fault did to a gradient, healing undoes: from the first step on the losses may differ.
    silent = any(one.silent for one in first.diagnoses)
    return all(
        math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(before[: 1 if silent else None], after, strict=False)
    )
