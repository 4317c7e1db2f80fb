"""Causes of conflicts: each a function from the facts to a Diagnosis, or None where it does not apply.

The order decides where several apply: first those that make the others moot (hooks, false alarms), then by writer.
"""

from __future__ import annotations

from collections.abc import Callable

from gradsan.diagnose.causes import functions, past_counter, results, unexplained, updates, values
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis

CAUSES: tuple[Callable[[Facts], Diagnosis | None], ...] = (
    unexplained.hidden_by_saved_tensor_hooks,
    functions.checkpoint_closure,
    functions.context_attribute,
    functions.missing_mark_dirty,
    values.no_grad_write,
    values.forward_alias,
    past_counter.storage_emptied,
    past_counter.gathered_anew,
    past_counter.data_attribute,
    past_counter.memory_alias,
    past_counter.collective,
    past_counter.statistics,
    *past_counter.WITHOUT_MORE,
    results.buffer_filled_in_loop,
    unexplained.false_alarm,
    updates.state_carried_over,
    updates.step_between_forward_and_backward,
    updates.statistics_updated,
    results.inplace_module,
    results.input_changed_between_passes,
    results.result_overwritten,
    results.operand_overwritten,
    unexplained.unknown_writer,
)

__all__ = ["CAUSES"]
