"""Source code of the program: from frames to lines, expressions, names, and lines that might be changed.

It reads source text only: it runs nothing, imports nothing of the program, and needs no torch. Every function answers
None, or an empty collection, rather than a guess where the source is missing, is not what ran, or does not decide.
"""

from gradsan.source.bindings import Carried, binds_result, bound_name, carried_names, method_receiver, takes_result
from gradsan.source.calls import (
    alias_of,
    called_as_hook,
    callers_expression,
    clone_handed_out,
    dies_with_call,
    reads_again,
    returned_by_hook,
)
from gradsan.source.change import Change, add_keyword, apply_change, changed_lines
from gradsan.source.cut_scopes import context_around
from gradsan.source.cuts import Cut, Live, find_cuts, grad_switched_off, read_with_graph
from gradsan.source.identifiers import assigned_names, consumed_names
from gradsan.source.kept import Addition, Used, additions, assignments, uses_in
from gradsan.source.locate import (
    Expression,
    Statement,
    expression_at,
    expressions_at,
    statement_at,
    statements_at,
)
from gradsan.source.modules import Shape, inplace_layer_false
from gradsan.source.rewrite.functions import (
    bind_early,
    earlier_reads,
    kept_on_context,
    mark_dirty,
    rebound_at,
    save_for_backward,
)
from gradsan.source.rewrite.listing import list_and_stack
from gradsan.source.rewrite.moving import bound_names, detach_reads, move_behind, run_again, taken_from
from gradsan.source.rewrite.out_of_place import out_of_place, recorded, written_for_others
from gradsan.source.rewrite.scatter import element_out_of_place, part_out_of_place
from gradsan.source.rewrite.suggest import (
    clone_at_save,
    clone_before,
    detach_at,
    drop_keyword,
    has_keyword,
    inplace_false,
)
from gradsan.source.rounds import (
    backward_of_sum,
    detach_after,
    detach_after_round,
    frames_between,
    in_same_function,
    is_item_of_loop,
    is_read_between,
    keep_graph,
    shape_bound_at,
)
from gradsan.source.targets import called_expression, operand_expressions, written_expression
from gradsan.source.tree import is_cell, source_line, source_lines
from gradsan.source.writing import (
    Made,
    Written,
    attribute_owner,
    definition_of,
    reads_gradient,
    under_no_grad,
    writing_at,
)

__all__ = [
    "Addition",
    "Carried",
    "Change",
    "Cut",
    "Expression",
    "Live",
    "Made",
    "Shape",
    "Statement",
    "Used",
    "Written",
    "add_keyword",
    "additions",
    "alias_of",
    "apply_change",
    "assigned_names",
    "assignments",
    "attribute_owner",
    "backward_of_sum",
    "bind_early",
    "binds_result",
    "bound_name",
    "bound_names",
    "called_as_hook",
    "called_expression",
    "callers_expression",
    "carried_names",
    "changed_lines",
    "clone_at_save",
    "clone_before",
    "clone_handed_out",
    "consumed_names",
    "context_around",
    "definition_of",
    "detach_after",
    "detach_after_round",
    "detach_at",
    "detach_reads",
    "dies_with_call",
    "drop_keyword",
    "earlier_reads",
    "element_out_of_place",
    "expression_at",
    "expressions_at",
    "find_cuts",
    "frames_between",
    "grad_switched_off",
    "has_keyword",
    "in_same_function",
    "inplace_false",
    "inplace_layer_false",
    "is_cell",
    "is_item_of_loop",
    "is_read_between",
    "keep_graph",
    "kept_on_context",
    "list_and_stack",
    "mark_dirty",
    "method_receiver",
    "move_behind",
    "operand_expressions",
    "out_of_place",
    "part_out_of_place",
    "read_with_graph",
    "reads_again",
    "reads_gradient",
    "rebound_at",
    "recorded",
    "returned_by_hook",
    "run_again",
    "save_for_backward",
    "shape_bound_at",
    "source_line",
    "source_lines",
    "statement_at",
    "statements_at",
    "taken_from",
    "takes_result",
    "under_no_grad",
    "uses_in",
    "writing_at",
    "written_expression",
    "written_for_others",
]
