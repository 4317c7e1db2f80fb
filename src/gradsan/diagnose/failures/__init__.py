"""Causes of failures: autograd's errors and warnings other than the version check's, grouped by code.

``_CAUSES`` maps each row of the catalogue to the one function that explains it: from the failure to a
:class:`~gradsan.model.Diagnosis`, or None where the row has another cause this time. A rejected statement with one
reason is a row of ``statements.REFUSED``. The parts of such a diagnosis are built in ``parts.py``; its words are
``title.<slug>`` and ``explanation.<slug>``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradsan.diagnose.failures import (
    checkpoints,
    compiled,
    distributed,
    expanded,
    gradients,
    kept_gradients,
    loss_without_graph,
    meaning,
    one_tensor,
    replaced,
    second_backward,
    statements,
    training,
    unreached,
    views,
)
from gradsan.model import Diagnosis, Failure

_CAUSES: Mapping[str, Callable[[Failure], Diagnosis | None]] = {
    row: explain
    for explain, rows in (
        (views.leaf_written, ("leaf_inplace", "leaf_view_inplace", "leaf_marked_dirty")),
        (views.view_base_written, ("multi_view_base_written", "unrecorded_view_base_written")),
        (views.function_view_written, ("function_view_inplace",)),
        (views.dirty_not_input, ("dirty_not_input",)),
        (expanded.expanded_written, ("memory_overlap",)),
        (views.saved_tensor_detached, ("saved_detached",)),
        (views.negative_slope_in_place, ("negative_slope",)),
        (views.view_not_fresh, ("view_same_as_base", "view_with_history")),
        *((refused.explain, refused.rows) for refused in statements.REFUSED),
        (second_backward.second_backward, ("freed_graph",)),
        (loss_without_graph.loss_without_graph, ("no_graph",)),
        (gradients.graph_rules, gradients.RULES),
        (unreached.leaf_lost, ("leaf_lost",)),
        (unreached.parameter_not_reached, ("parameter_not_reached",)),
        (unreached.value_written_past, ("value_written_past",)),
        (unreached.gradient_cancels, ("gradient_cancels",)),
        (unreached.parameter_behind_flat, ("parameter_behind_flat",)),
        (unreached.graph_grows, ("graph_grows",)),
        (unreached.grad_of_non_leaf, ("grad_of_non_leaf",)),
        (kept_gradients.gradient_kept, ("gradient_never_cleared",)),
        (kept_gradients.gradient_left, ("gradient_left_over",)),
        (kept_gradients.gradient_collected, ("gradient_collected",)),
        (kept_gradients.gradients_opposed, ("gradients_opposed",)),
        (gradients.gradient_overwritten, ("gradient_overwritten",)),
        (gradients.update_lost, ("update_not_differentiated",)),
        (gradients.hook_lost, ("hook_lost",)),
        (kept_gradients.gradient_ignored, ("gradient_ignored",)),
        (kept_gradients.second_derivative_lost, ("second_derivative_lost",)),
        (gradients.hook_repeated, ("hook_repeated",)),
        (gradients.hook_result_dropped, ("hook_result_dropped",)),
        (meaning.loss_changed, ("loss_changed",)),
        (meaning.value_changed, ("value_changed",)),
        (meaning.input_reused, ("input_reused",)),
        (meaning.saved_early, ("saved_early",)),
        (views.parameter_assigned, ("parameter_assigned",)),
        (replaced.parameter_result, ("parameter_result",)),
        (replaced.result_optimized, ("result_optimized",)),
        (meaning.kept_for_all_calls, ("kept_for_all_calls",)),
        (meaning.built_once, ("value_built_once",)),
        (meaning.term_constant, ("term_is_constant",)),
        (meaning.penalty_constant, ("penalty_is_constant",)),
        (meaning.term_cut, ("term_is_cut",)),
        (meaning.term_lost, ("term_lost",)),
        (meaning.term_left_out, ("term_left_out",)),
        (meaning.data_changed, ("data_changed_again",)),
        (
            one_tensor.second_name,
            (
                "second_name_changed",
                "list_of_one",
                "argument_changed",
                "arguments_are_one",
                "slices_overlap",
                one_tensor.RETURNED,
                one_tensor.KEPT_GRADIENT,
            ),
        ),
        (one_tensor.overwritten_name, ("name_overwritten",)),
        (one_tensor.gradients, ("gradients_are_one", "weights_are_one")),
        (one_tensor.changed_default, ("default_changed",)),
        (one_tensor.shared_gradient, ("gradient_of_two",)),
        (one_tensor.arrays, ("arrays_are_one",)),
        (one_tensor.memory_of_array, ("memory_of_array",)),
        (one_tensor.own_operand, ("own_operand", "own_difference")),
        (one_tensor.own_state, ("own_state",)),
        (expanded.windows_written, ("windows_written",)),
        (one_tensor.parameters, ("parameters_are_one",)),
        (one_tensor.shared_state, ("optimizer_state_shared",)),
        (one_tensor.expanded_rows, ("rows_are_one",)),
        (one_tensor.best_values, ("best_values_of_now",)),
        (one_tensor.kept_state, ("state_restored_itself", "states_are_one", "state_of_now")),
        (training.without_optimizer, ("parameter_without_optimizer",)),
        (training.thrown_away, ("gradient_thrown_away",)),
        (training.clip_without_effect, ("clip_without_effect",)),
        (training.schedule_without_effect, ("schedule_without_effect",)),
        (training.setting_of_a_copy, ("setting_of_a_copy",)),
        (training.flag_unread, ("flag_unread",)),
        (training.wrong_gradients, ("step_without_its_gradients",)),
        (training.update_dropped, ("update_dropped",)),
        (training.result_dropped, ("result_dropped",)),
        (checkpoints.checkpoint_differs, ("checkpoint_metadata", "checkpoint_count")),
        (checkpoints.checkpoint_input_plain, ("checkpoint_input_plain",)),
        (checkpoints.checkpoint_reentrant_grad, ("checkpoint_reentrant_grad",)),
        (checkpoints.cached_value_overwritten, ("cached_overwritten",)),
        (checkpoints.saved_hooks_refused, checkpoints.HOOK_FIXES),
        (checkpoints.saved_value_read_twice, ("saved_read_twice", "checkpoint_unpacked_twice")),
        (compiled.compiled_overwritten, ("compiled_version_error",)),
        (compiled.compiled_input_unsupported, ("compiled_inputs_share", "compiled_backward_writes")),
        (compiled.undeclared_mutation, ("undeclared_mutation", "undeclared_mutation_checked")),
        (compiled.compiled_memory_reused, compiled.REUSE_FIXES),
        (distributed.gradient_reduced_twice, ("ready_twice",)),
        (distributed.reduction_unfinished, ("reduction_unfinished",)),
        (distributed.sharded_rule_broken, distributed.SHARDED_FIXES),
    )
    for row in rows
}


def explain(failure: Failure) -> Diagnosis | None:
    """The diagnosis of ``failure``; None where its row has another cause this time, or none."""
    cause = _CAUSES.get(failure.row)
    return None if cause is None else cause(failure)
