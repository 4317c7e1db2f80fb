"""Causes of failures: autograd's errors and warnings other than the version check's, grouped by code.

A cause is a pair: the slugs of the catalogue's rows that it explains, and a function from the failure to a
:class:`~gradsan.model.Diagnosis`, or None where the row has another cause this time. It is registered in ``_CAUSES``,
whose order decides where several apply; a rejected statement with one reason is a row of ``statements.REFUSED``.
The parts of such a diagnosis are built in ``parts.py``; its words are ``title.<slug>`` and ``explanation.<slug>``.
"""

from __future__ import annotations

from collections.abc import Callable

from gradsan.diagnose.failures import (
    checkpoints,
    compiled,
    distributed,
    gradients,
    graph_rules,
    loss_without_graph,
    meaning,
    one_tensor,
    second_backward,
    training,
    unreached,
    views,
)
from gradsan.diagnose.failures.statements import REFUSED
from gradsan.model import Diagnosis, Failure

_CAUSES: tuple[tuple[tuple[str, ...], Callable[[Failure], Diagnosis | None]], ...] = (
    (views.LEAF_WRITTEN_ROWS, views.leaf_written),
    (second_backward.SECOND_BACKWARD_ROWS, second_backward.second_backward),
    (views.VIEW_BASE_WRITTEN_ROWS, views.view_base_written),
    (views.FUNCTION_VIEW_WRITTEN_ROWS, views.function_view_written),
    (views.MARK_DIRTY_MISUSED_ROWS, views.mark_dirty_misused),
    (views.EXPANDED_WRITTEN_ROWS, views.expanded_written),
    (views.SAVED_TENSOR_DETACHED_ROWS, views.saved_tensor_detached),
    (views.NEGATIVE_SLOPE_IN_PLACE_ROWS, views.negative_slope_in_place),
    (loss_without_graph.LOSS_WITHOUT_GRAPH_ROWS, loss_without_graph.loss_without_graph),
    (graph_rules.GRAPH_RULES_ROWS, graph_rules.graph_rules),
    (unreached.UNREACHED_ROWS, unreached.unreached),
    (gradients.GRADIENT_KEPT_ROWS, gradients.gradient_kept),
    (gradients.GRADIENT_OVERWRITTEN_ROWS, gradients.gradient_overwritten),
    (gradients.UPDATE_LOST_ROWS, gradients.update_lost),
    (gradients.HOOK_LOST_ROWS, gradients.hook_lost),
    (meaning.LOSS_CHANGED_ROWS, meaning.loss_changed),
    (meaning.INPUT_REUSED_ROWS, meaning.input_reused),
    (meaning.SAVED_EARLY_ROWS, meaning.saved_early),
    (meaning.KEPT_FOR_ALL_CALLS_ROWS, meaning.kept_for_all_calls),
    (one_tensor.SECOND_NAME_ROWS, one_tensor.second_name),
    (one_tensor.OWN_OPERAND_ROWS, one_tensor.own_operand),
    (one_tensor.KEPT_STATE_ROWS, one_tensor.kept_state),
    (meaning.BUILT_ONCE_ROWS, meaning.built_once),
    (meaning.TERM_CONSTANT_ROWS, meaning.term_constant),
    (meaning.VALUE_CHANGED_ROWS, meaning.value_changed),
    (meaning.PENALTY_CONSTANT_ROWS, meaning.penalty_constant),
    (meaning.TERM_CUT_ROWS, meaning.term_cut),
    (meaning.TERM_LOST_ROWS, meaning.term_lost),
    (meaning.DATA_CHANGED_ROWS, meaning.data_changed),
    (training.WITHOUT_OPTIMIZER_ROWS, training.without_optimizer),
    (training.THROWN_AWAY_ROWS, training.thrown_away),
    (training.CLIP_ROWS, training.clip_without_effect),
    (training.SCHEDULE_ROWS, training.schedule_without_effect),
    (checkpoints.CHECKPOINT_DIFFERS_ROWS, checkpoints.checkpoint_differs),
    (compiled.COMPILED_OVERWRITTEN_ROWS, compiled.compiled_overwritten),
    (checkpoints.SAVED_TENSOR_HOOK_MISUSED_ROWS, checkpoints.saved_tensor_hook_misused),
    (checkpoints.SAVED_VALUE_READ_TWICE_ROWS, checkpoints.saved_value_read_twice),
    (checkpoints.SAVED_HOOKS_REFUSED_ROWS, checkpoints.saved_hooks_refused),
    (checkpoints.CACHED_VALUE_OVERWRITTEN_ROWS, checkpoints.cached_value_overwritten),
    (distributed.GRADIENT_REDUCED_TWICE_ROWS, distributed.gradient_reduced_twice),
    (distributed.REDUCTION_UNFINISHED_ROWS, distributed.reduction_unfinished),
    (compiled.COMPILED_INPUT_UNSUPPORTED_ROWS, compiled.compiled_input_unsupported),
    (compiled.UNDECLARED_MUTATION_ROWS, compiled.undeclared_mutation),
    (compiled.COMPILED_MEMORY_REUSED_ROWS, compiled.compiled_memory_reused),
    (checkpoints.CHECKPOINT_INPUT_PLAIN_ROWS, checkpoints.checkpoint_input_plain),
    (checkpoints.CHECKPOINT_FORM_NOT_SAID_ROWS, checkpoints.checkpoint_form_not_said),
    (distributed.SHARDED_RULE_BROKEN_ROWS, distributed.sharded_rule_broken),
    (views.VIEW_NOT_FRESH_ROWS, views.view_not_fresh),
    *((refused.rows, refused.explain) for refused in REFUSED),
)


def explain(failure: Failure) -> Diagnosis | None:
    """The diagnosis of the first cause that recognises ``failure``; None where none does."""
    for rows, explain_it in _CAUSES:
        if failure.row in rows:
            diagnosis = explain_it(failure)
            if diagnosis is not None:
                return diagnosis
    return None
