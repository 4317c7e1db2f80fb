"""The reference run: the unchanged program, healed, with statements that PyTorch rejects carried out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradsan import source
from gradsan.diagnose.build import OVERLAPPING
from gradsan.model import Diagnosis
from gradsan.repair.compare import compare
from gradsan.repair.fixes.own_copies import second_names_copied
from gradsan.repair.patch import Patch
from gradsan.repair.training import compare_trainings
from gradsan.repair.trials.runner import Runner
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
    "unrecorded_view_written": ("record_views", "no_inference"),
    "view_base_written": ("single_views", "record_views", "no_inference"),
    "expanded_written": ("own_memory",),
    "written_from_itself": ("own_sources",),
    "function_view_written": ("own_results",),
    "inference_tensor_used": ("no_inference",),
    "compiled_overwritten": ("run_eagerly",),
    "gradient_overwritten": ("own_gradients",),
    "context_attribute": ("own_context",),
    "checkpoint_closure": ("without_checkpoint",),
    "saved_tensor_detached": ("release_gradients",),
    "gradient_reduced_twice": ("own_rank",),
    "gathered_anew": ("gathered_values",),
    "export_requires_grad": ("read_values",),
    "custom_backward_returns": ("padded_gradients",),
    "requires_grad_flag": ("cut_results", "plain_integers"),
    "result_deepcopied": ("graph_copies",),
    "view_detached_in_place": ("own_views",),
}
"""The allowances, by the cause of a fault, with which the unchanged program gets past it."""

_DOUBTED = {"read_values": "read_other_values", "graph_copies": "plain_copies"}
"""The allowances that may not be what was meant, with the one that a second run has instead."""


def reference_for(request: Request, faults: Sequence[Diagnosis]) -> Request:
    """The request for the run with the correct gradients: healed, with statements that PyTorch rejects carried out."""
    allowances = {name for fault in faults for name in _ALLOWANCES.get(fault.cause, ())}
    if any(note.key == OVERLAPPING for fault in faults for note in fault.notes):
        allowances.add("own_memory")
    if any(one.severity == "error" for one in faults) and any(one.cause == "checkpoint_input_plain" for one in faults):
        # The program ends where what the checkpoint cut off is to be trained.
        allowances.add("without_checkpoint")
    for fault in faults:
        if any(fix.summary.key == "help.own_name_in_forward" for fix in fault.fixes):
            continue  # carried out, the write would change the parameter for all later forwards
        if fault.cause == "leaf_written":
            first = next((fix.kind for fix in fault.fixes), "no_grad")
            of_layer = first == "disable_inplace_module"
            is_new = of_layer or first in ("out_of_place", "clone_before_mutation")
            allowances.add("renew_leaves" if is_new else "write_leaves")
            if is_new and fault.title.key == "title.leaf_view_written":
                allowances |= {"own_leaf_views", "own_memory"}  # what repeats the leaf is written row by row
            written = (label for label in fault.labels if label.role == "written")
            # Of a function (``relu(x, inplace=True)``, no method ``relu_``) the result is meant.
            if is_new and (
                of_layer
                or any(
                    not (label.op or "_").endswith("_") or source.computes_with_result(label.frame, label.op or "")
                    for label in written
                )
            ):
                allowances.add("renew_results")
    files = {**request.files, **Patch().with_lines(second_names_copied(faults)).files}
    return replace(request, mode="heal", allowances=frozenset(allowances), files=files)


def was_refused(fault: Diagnosis) -> bool:
    """Whether the program as written has no gradients: PyTorch rejected a statement, or they are NaN."""
    return fault.cause == "leaf_written" or fault.nonfinite is not None


def is_replayable(first: Trial, again: Trial) -> bool:
    """Whether both runs began the same backwards with the same losses, as far as healing cannot have changed them.

    A run that timed out is no evidence against it.
    """
    before, after = first.recording.begun, again.recording.begun
    if len(after) < len(before):
        return again.timed_out
    # Healing corrects the gradients of a silent fault: from the first step on the losses may differ.
    silent = any(one.silent for one in first.diagnoses)
    return all(
        math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=1e-12) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(before[: 1 if silent else None], after, strict=False)
    )


def healed_run(runner: Runner, request: Request, faults: Sequence[Diagnosis]) -> tuple[Request, Trial]:
    """The reference run for ``request``, and what it was asked.

    Values that are read outside of PyTorch are carried out only where the training does not depend on them: else what
    is computed from them may have been meant to be trained. Deep copies have the graph, or none, where the other loses
    gradients; where both train alike, it does not matter, and where neither loses any, it is not known which is meant.
    """
    reference = reference_for(request, faults)
    healed = runner.run(reference)
    for allowance, doubt in _DOUBTED.items():
        if allowance not in reference.allowances or not healed.recording.finished:
            continue
        rest = reference.allowances - {allowance}
        other = replace(reference, allowances=rest | {doubt})
        doubted = runner.run(other)
        if _trains_alike(healed, doubted):
            continue
        if allowance == "graph_copies":
            if not doubted.recording.finished or compare(healed.recording, doubted.recording).lost:
                continue  # without the graph of the copy something is not trained
            if compare(doubted.recording, healed.recording).lost:
                reference, healed = other, doubted
                continue
        reference = replace(reference, allowances=rest)
        healed = runner.run(reference)
    return reference, healed


def _trains_alike(healed: Trial, other: Trial) -> bool:
    right, tried = healed.recording, other.recording
    if not tried.finished or not compare(right, tried).is_equal or right.begun != tried.begun:
        return False
    return not compare_trainings(right, tried).parameters
