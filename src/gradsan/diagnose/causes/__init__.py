"""One file per cause: ``match(facts)`` gives a Diagnosis, or None where the cause is not this one.

The order decides where several would fit: first what hides the question (hooks, false alarms), then who wrote.
"""

from __future__ import annotations

from collections.abc import Callable

from gradsan.diagnose.causes import (
    buffer_filled_in_loop,
    checkpoint_closure,
    collective,
    context_attribute,
    data_attribute,
    false_alarm,
    forward_alias,
    fused_optimizer,
    gathered_anew,
    hidden_by_saved_tensor_hooks,
    inplace_module,
    input_changed_between_passes,
    kernel_without_schema,
    memory_alias,
    missing_mark_dirty,
    no_grad_write,
    operand_overwritten,
    result_overwritten,
    state_carried_over,
    statistics,
    statistics_updated,
    step_between_forward_and_backward,
    storage_alias,
    storage_emptied,
    unknown_writer,
)
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CAUSES: tuple[Callable[[Facts], Diagnosis | None], ...] = (
    hidden_by_saved_tensor_hooks.match,
    checkpoint_closure.match,
    context_attribute.match,
    missing_mark_dirty.match,
    no_grad_write.match,
    forward_alias.match,
    storage_emptied.match,
    gathered_anew.match,
    data_attribute.match,
    memory_alias.match,
    storage_alias.match,
    fused_optimizer.match,
    statistics.match,
    collective.match,
    kernel_without_schema.match,
    buffer_filled_in_loop.match,
    false_alarm.match,
    state_carried_over.match,
    step_between_forward_and_backward.match,
    statistics_updated.match,
    inplace_module.match,
    input_changed_between_passes.match,
    result_overwritten.match,
    operand_overwritten.match,
    unknown_writer.match,
)

__all__ = ["CAUSES"]
