"""Source code of the watched program: lines, statements, expressions and names at a frame, and changes of lines.

Only source text is read: nothing is run or imported, and torch is not needed. Where the source is missing, is not the
one that ran, or is ambiguous, functions return None or an empty collection instead of a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsan._lazy import names_on_demand

if TYPE_CHECKING:
    from gradsan.source.bindings import Carried as Carried
    from gradsan.source.bindings import binding_of as binding_of
    from gradsan.source.bindings import binds_result as binds_result
    from gradsan.source.bindings import bound_name as bound_name
    from gradsan.source.bindings import carried_names as carried_names
    from gradsan.source.bindings import method_receiver as method_receiver
    from gradsan.source.bindings import passed_for_own as passed_for_own
    from gradsan.source.bindings import returns_argument as returns_argument
    from gradsan.source.bindings import taken_for_own as taken_for_own
    from gradsan.source.bindings import takes_result as takes_result
    from gradsan.source.calls import alias_of as alias_of
    from gradsan.source.calls import called_as_hook as called_as_hook
    from gradsan.source.calls import called_expression as called_expression
    from gradsan.source.calls import callers_expression as callers_expression
    from gradsan.source.calls import clone_given as clone_given
    from gradsan.source.calls import clone_handed_out as clone_handed_out
    from gradsan.source.calls import dies_with_call as dies_with_call
    from gradsan.source.calls import earlier_result as earlier_result
    from gradsan.source.calls import first_argument as first_argument
    from gradsan.source.calls import made_by_call as made_by_call
    from gradsan.source.calls import reads_again as reads_again
    from gradsan.source.calls import returned_by_hook as returned_by_hook
    from gradsan.source.change import Change as Change
    from gradsan.source.change import add_keyword as add_keyword
    from gradsan.source.change import apply_change as apply_change
    from gradsan.source.change import changed_at as changed_at
    from gradsan.source.change import changed_lines as changed_lines
    from gradsan.source.collected import detach_collected as detach_collected
    from gradsan.source.collected import forget_collected as forget_collected
    from gradsan.source.cut_scopes import Live as Live
    from gradsan.source.cut_scopes import context_around as context_around
    from gradsan.source.cuts import Cut as Cut
    from gradsan.source.cuts import find_cuts as find_cuts
    from gradsan.source.cuts import grad_switched_off as grad_switched_off
    from gradsan.source.cuts import takes_cut as takes_cut
    from gradsan.source.gradients import clears_each_part as clears_each_part
    from gradsan.source.gradients import graph_for_gradient as graph_for_gradient
    from gradsan.source.gradients import kept_gradient as kept_gradient
    from gradsan.source.gradients import makes_discrete as makes_discrete
    from gradsan.source.gradients import reads_gradients as reads_gradients
    from gradsan.source.identifiers import assigned_names as assigned_names
    from gradsan.source.identifiers import consumed_names as consumed_names
    from gradsan.source.joined import on_own_lines as on_own_lines
    from gradsan.source.kept import Addition as Addition
    from gradsan.source.kept import added_to_optimizer as added_to_optimizer
    from gradsan.source.kept import additions as additions
    from gradsan.source.kept import are_later_rounds as are_later_rounds
    from gradsan.source.kept import are_updated_alike as are_updated_alike
    from gradsan.source.kept import assignments as assignments
    from gradsan.source.kept import chooses_parameters as chooses_parameters
    from gradsan.source.kept import is_bound_by_choice as is_bound_by_choice
    from gradsan.source.kept import is_computed_in_rounds as is_computed_in_rounds
    from gradsan.source.kept import is_filled_once as is_filled_once
    from gradsan.source.kept import is_target_in_rounds as is_target_in_rounds
    from gradsan.source.kept import uses_in as uses_in
    from gradsan.source.locate import Expression as Expression
    from gradsan.source.locate import Statement as Statement
    from gradsan.source.locate import expression_at as expression_at
    from gradsan.source.locate import expressions_at as expressions_at
    from gradsan.source.locate import is_argument as is_argument
    from gradsan.source.locate import statement_at as statement_at
    from gradsan.source.modules import DETACHED as DETACHED
    from gradsan.source.modules import Shape as Shape
    from gradsan.source.modules import inplace_layer_false as inplace_layer_false
    from gradsan.source.modules import state_given as state_given
    from gradsan.source.reuse import argument_read_later as argument_read_later
    from gradsan.source.reuse import collected_result as collected_result
    from gradsan.source.reuse import copy_second_name as copy_second_name
    from gradsan.source.reuse import is_made_in_round as is_made_in_round
    from gradsan.source.reuse import read_as_before as read_as_before
    from gradsan.source.reuse import second_name as second_name
    from gradsan.source.rewrite.cutting import detach_held as detach_held
    from gradsan.source.rewrite.finite import FiniteForm as FiniteForm
    from gradsan.source.rewrite.finite import finite_forms as finite_forms
    from gradsan.source.rewrite.functions import bind_early as bind_early
    from gradsan.source.rewrite.functions import copy_saved_early as copy_saved_early
    from gradsan.source.rewrite.functions import earlier_reads as earlier_reads
    from gradsan.source.rewrite.functions import gradients_for_inputs as gradients_for_inputs
    from gradsan.source.rewrite.functions import kept_on_context as kept_on_context
    from gradsan.source.rewrite.functions import mark_dirty as mark_dirty
    from gradsan.source.rewrite.functions import rebound_at as rebound_at
    from gradsan.source.rewrite.functions import save_for_backward as save_for_backward
    from gradsan.source.rewrite.functions import saved_early as saved_early
    from gradsan.source.rewrite.listing import list_and_stack as list_and_stack
    from gradsan.source.rewrite.listing import rebuilt_list as rebuilt_list
    from gradsan.source.rewrite.moving import bound_names as bound_names
    from gradsan.source.rewrite.moving import detach_given as detach_given
    from gradsan.source.rewrite.moving import detach_reads as detach_reads
    from gradsan.source.rewrite.moving import move_behind as move_behind
    from gradsan.source.rewrite.moving import taken_from as taken_from
    from gradsan.source.rewrite.moving import within_block as within_block
    from gradsan.source.rewrite.out_of_place import argument_out_of_place as argument_out_of_place
    from gradsan.source.rewrite.out_of_place import out_of_place as out_of_place
    from gradsan.source.rewrite.out_of_place import recorded as recorded
    from gradsan.source.rewrite.out_of_place import result_out_of_place as result_out_of_place
    from gradsan.source.rewrite.out_of_place import written_for_caller as written_for_caller
    from gradsan.source.rewrite.out_of_place import written_for_others as written_for_others
    from gradsan.source.rewrite.renewing import run_again as run_again
    from gradsan.source.rewrite.renewing import run_again_for_next_round as run_again_for_next_round
    from gradsan.source.rewrite.renewing import run_again_for_state as run_again_for_state
    from gradsan.source.rewrite.renewing import view_again as view_again
    from gradsan.source.rewrite.scatter import element_out_of_place as element_out_of_place
    from gradsan.source.rewrite.scatter import part_out_of_place as part_out_of_place
    from gradsan.source.rewrite.suggest import clone_at_save as clone_at_save
    from gradsan.source.rewrite.suggest import clone_before as clone_before
    from gradsan.source.rewrite.suggest import detach_at as detach_at
    from gradsan.source.rewrite.suggest import drop_keyword as drop_keyword
    from gradsan.source.rewrite.suggest import has_keyword as has_keyword
    from gradsan.source.rewrite.suggest import inplace_false as inplace_false
    from gradsan.source.rewrite.suggest import switch_on_before as switch_on_before
    from gradsan.source.rewrite.suggest import undone as undone
    from gradsan.source.rewrite.suggest import undone_numbers as undone_numbers
    from gradsan.source.rewrite.uncut import Uncut as Uncut
    from gradsan.source.rewrite.uncut import cut_at_use as cut_at_use
    from gradsan.source.rewrite.uncut import read_with_graph as read_with_graph
    from gradsan.source.rewrite.uncut import term_uncut as term_uncut
    from gradsan.source.rewrite.updates import under_no_grad as under_no_grad
    from gradsan.source.rewrite.updates import updated_in_place as updated_in_place
    from gradsan.source.rounds import backward_of_sum as backward_of_sum
    from gradsan.source.rounds import clears_between as clears_between
    from gradsan.source.rounds import detach_after as detach_after
    from gradsan.source.rounds import detach_after_round as detach_after_round
    from gradsan.source.rounds import enter_each_round as enter_each_round
    from gradsan.source.rounds import enter_once_more as enter_once_more
    from gradsan.source.rounds import frames_between as frames_between
    from gradsan.source.rounds import in_one_loop as in_one_loop
    from gradsan.source.rounds import in_same_function as in_same_function
    from gradsan.source.rounds import in_same_loops as in_same_loops
    from gradsan.source.rounds import is_item_of_loop as is_item_of_loop
    from gradsan.source.rounds import is_read_afterwards as is_read_afterwards
    from gradsan.source.rounds import is_read_between as is_read_between
    from gradsan.source.rounds import keep_graph as keep_graph
    from gradsan.source.rounds import reads_what_it_binds as reads_what_it_binds
    from gradsan.source.rounds import shape_bound_at as shape_bound_at
    from gradsan.source.rounds import walked_over as walked_over
    from gradsan.source.targets import Operation as Operation
    from gradsan.source.targets import assigned_data as assigned_data
    from gradsan.source.targets import mixed_operand as mixed_operand
    from gradsan.source.targets import operand_expressions as operand_expressions
    from gradsan.source.targets import operation_at as operation_at
    from gradsan.source.targets import own_difference as own_difference
    from gradsan.source.targets import target_and_operand as target_and_operand
    from gradsan.source.targets import written_expression as written_expression
    from gradsan.source.tree import is_cell as is_cell
    from gradsan.source.tree import source_line as source_line
    from gradsan.source.tree import source_lines as source_lines
    from gradsan.source.writing import Made as Made
    from gradsan.source.writing import attribute_owner as attribute_owner
    from gradsan.source.writing import computes_with_result as computes_with_result
    from gradsan.source.writing import definition_of as definition_of
    from gradsan.source.writing import is_of_itself as is_of_itself
    from gradsan.source.writing import number_given as number_given
    from gradsan.source.writing import reads_gradient as reads_gradient
    from gradsan.source.writing import writing_at as writing_at

_NAMES = {
    "bindings": (
        "Carried binding_of binds_result bound_name carried_names method_receiver passed_for_own returns_argument "
        "taken_for_own takes_result"
    ),
    "calls": (
        "alias_of called_as_hook called_expression callers_expression clone_given clone_handed_out dies_with_call "
        "earlier_result first_argument made_by_call reads_again returned_by_hook"
    ),
    "change": "Change add_keyword apply_change changed_at changed_lines",
    "collected": "detach_collected forget_collected",
    "cut_scopes": "context_around",
    "rewrite.cutting": "detach_held",
    "cuts": "Cut Live find_cuts grad_switched_off takes_cut",
    "gradients": "clears_each_part graph_for_gradient kept_gradient makes_discrete reads_gradients",
    "identifiers": "assigned_names consumed_names",
    "kept": (
        "Addition added_to_optimizer additions are_later_rounds are_updated_alike assignments chooses_parameters "
        "is_bound_by_choice is_computed_in_rounds is_filled_once is_target_in_rounds uses_in"
    ),
    "joined": "on_own_lines",
    "locate": "Expression Statement expression_at expressions_at is_argument statement_at",
    "modules": "DETACHED Shape inplace_layer_false state_given",
    "reuse": ("argument_read_later collected_result copy_second_name is_made_in_round read_as_before second_name"),
    "rewrite.finite": "FiniteForm finite_forms",
    "rewrite.functions": (
        "bind_early copy_saved_early earlier_reads gradients_for_inputs kept_on_context mark_dirty "
        "rebound_at save_for_backward saved_early"
    ),
    "rewrite.listing": "list_and_stack rebuilt_list",
    "rewrite.moving": "bound_names detach_given detach_reads move_behind taken_from within_block",
    "rewrite.out_of_place": (
        "argument_out_of_place out_of_place recorded result_out_of_place written_for_caller written_for_others"
    ),
    "rewrite.renewing": "run_again run_again_for_next_round run_again_for_state view_again",
    "rewrite.scatter": "element_out_of_place part_out_of_place",
    "rewrite.suggest": (
        "clone_at_save clone_before detach_at drop_keyword has_keyword inplace_false switch_on_before undone "
        "undone_numbers"
    ),
    "rewrite.uncut": "Uncut cut_at_use read_with_graph term_uncut",
    "rewrite.updates": "under_no_grad updated_in_place",
    "rounds": (
        "backward_of_sum clears_between detach_after detach_after_round enter_each_round enter_once_more "
        "frames_between in_one_loop in_same_function in_same_loops is_item_of_loop is_read_afterwards is_read_between "
        "keep_graph reads_what_it_binds shape_bound_at walked_over"
    ),
    "targets": (
        "Operation assigned_data mixed_operand operand_expressions operation_at own_difference target_and_operand "
        "written_expression"
    ),
    "tree": "is_cell source_line source_lines",
    "writing": (
        "Made attribute_owner computes_with_result definition_of is_of_itself number_given reads_gradient "
        "scaled_before writing_at"
    ),
}

_HOMES = {module: tuple(names.split()) for module, names in _NAMES.items()}

__getattr__ = names_on_demand(__name__, _HOMES)
