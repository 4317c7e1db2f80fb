"""What lies behind a failure, one file a cause: errors and warnings of autograd's other than the version check's.

A cause is a module with ``ROWS``, the slugs of the catalogue's rows it explains, and ``match(failure)``, which gives a
:class:`~gradsan.model.Diagnosis`, or None where the row has another cause this time. Those with one code name it
``CODE`` and ``SLUG``. It is registered in ``_CAUSES``, whose order decides where several would fit. The parts of such a
diagnosis are built in ``parts.py``; its words are ``title.<slug>`` and ``explanation.<slug>``.
"""

from __future__ import annotations

from gradsan.diagnose.failures import (
    cached_value_overwritten,
    checkpoint_differs,
    checkpoint_form_not_said,
    checkpoint_input_plain,
    checkpoint_needless,
    checkpoint_reentrant_grad,
    compiled_input_unsupported,
    compiled_overwritten,
    custom_op_aliases,
    data_replaced,
    expanded_written,
    export_requires_grad,
    function_view_written,
    gradient_kept,
    gradient_overwritten,
    gradient_reduced_twice,
    graph_rules,
    inference_tensor_used,
    leaf_written,
    loss_without_graph,
    mark_dirty_misused,
    mutation_context_misplaced,
    negative_slope_in_place,
    one_of_several_views_written,
    out_requires_grad,
    reduction_unfinished,
    requires_grad_flag,
    resized_with_grad,
    result_deepcopied,
    result_does_not_fit,
    saved_hooks_refused,
    saved_tensor_detached,
    saved_tensor_hook_misused,
    saved_value_read_twice,
    second_backward,
    sharded_rule_broken,
    transform_writes_captured,
    undeclared_mutation,
    unreached,
    unrecorded_view_written,
    update_lost,
    view_base_written,
    view_detached_in_place,
    view_not_fresh,
    vmap_writes_smaller,
    written_from_itself,
)
from gradsan.model import Diagnosis, Failure

_CAUSES = (
    leaf_written,
    second_backward,
    out_requires_grad,
    one_of_several_views_written,
    view_base_written,
    unrecorded_view_written,
    function_view_written,
    mark_dirty_misused,
    expanded_written,
    written_from_itself,
    view_detached_in_place,
    saved_tensor_detached,
    inference_tensor_used,
    resized_with_grad,
    data_replaced,
    negative_slope_in_place,
    result_does_not_fit,
    export_requires_grad,
    requires_grad_flag,
    result_deepcopied,
    loss_without_graph,
    graph_rules,
    unreached,
    gradient_kept,
    gradient_overwritten,
    update_lost,
    checkpoint_differs,
    checkpoint_reentrant_grad,
    checkpoint_needless,
    compiled_overwritten,
    custom_op_aliases,
    transform_writes_captured,
    vmap_writes_smaller,
    saved_tensor_hook_misused,
    saved_value_read_twice,
    saved_hooks_refused,
    mutation_context_misplaced,
    cached_value_overwritten,
    gradient_reduced_twice,
    reduction_unfinished,
    compiled_input_unsupported,
    undeclared_mutation,
    checkpoint_input_plain,
    checkpoint_form_not_said,
    sharded_rule_broken,
    view_not_fresh,
)


def explain(failure: Failure) -> Diagnosis | None:
    """The diagnosis of the first cause that recognises ``failure``; None where none does."""
    for cause in _CAUSES:
        if failure.row in cause.ROWS:
            diagnosis: Diagnosis | None = cause.match(failure)
            if diagnosis is not None:
                return diagnosis
    return None
