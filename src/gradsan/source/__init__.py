"""Source code of the watched program: lines, statements, expressions and names at a frame, and changes of lines.

Only source text is read: nothing is run or imported, and torch is not needed. Where the source is missing, is not the
one that ran, or is ambiguous, functions return None or an empty collection instead of a guess.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsan._lazy import names_on_demand

if TYPE_CHECKING:
    from gradsan.source.change import *
    from gradsan.source.flow.aliases import *
    from gradsan.source.flow.bindings import *
    from gradsan.source.flow.calls import *
    from gradsan.source.flow.collected import *
    from gradsan.source.flow.cuts import *
    from gradsan.source.flow.emptied import *
    from gradsan.source.flow.kept import *
    from gradsan.source.flow.members import *
    from gradsan.source.flow.modules import *
    from gradsan.source.flow.reaching import *
    from gradsan.source.flow.results import *
    from gradsan.source.flow.reuse import *
    from gradsan.source.flow.rounds import *
    from gradsan.source.flow.scopes import *
    from gradsan.source.flow.targets import *
    from gradsan.source.flow.writing import *
    from gradsan.source.identifiers import *
    from gradsan.source.imports import *
    from gradsan.source.intent.additions import *
    from gradsan.source.intent.attributes import *
    from gradsan.source.intent.conditions import *
    from gradsan.source.intent.contents import *
    from gradsan.source.intent.flags import *
    from gradsan.source.intent.gradients import *
    from gradsan.source.joined import *
    from gradsan.source.locate import *
    from gradsan.source.rewrite.asked import *
    from gradsan.source.rewrite.checkpointed import *
    from gradsan.source.rewrite.copied import *
    from gradsan.source.rewrite.cuts.entered import *
    from gradsan.source.rewrite.cuts.uncut import *
    from gradsan.source.rewrite.cuts.undone import *
    from gradsan.source.rewrite.cuts.unrecorded import *
    from gradsan.source.rewrite.detached import *
    from gradsan.source.rewrite.filled import *
    from gradsan.source.rewrite.functions import *
    from gradsan.source.rewrite.given import *
    from gradsan.source.rewrite.leaves import *
    from gradsan.source.rewrite.listing import *
    from gradsan.source.rewrite.moving import *
    from gradsan.source.rewrite.numerics.finite import *
    from gradsan.source.rewrite.out_of_place import *
    from gradsan.source.rewrite.renewing import *
    from gradsan.source.rewrite.scatter import *
    from gradsan.source.rewrite.stepping import *
    from gradsan.source.rewrite.suggest import *
    from gradsan.source.rewrite.updates import *
    from gradsan.source.tree import *

_NAMES = {
    "change": "Change add_keyword apply_change changed_at changed_lines together",
    "flow.aliases": "read_as_before",
    "flow.bindings": (
        "Carried binding_of binds_result bound_name carried_names method_receiver passed_for_own returns_argument "
        "taken_for_own takes_result"
    ),
    "flow.calls": (
        "alias_of called_as_hook called_expression callers_expression dies_with_call first_argument index_expressions "
        "made_by_call reads_again returned_by_hook returns_to_several"
    ),
    "flow.collected": "detach_collected",
    "flow.cuts": "Cut find_cuts grad_left_off grad_switched_off takes_cut",
    "flow.emptied": "forget_collected is_drawn_by_chance",
    "flow.kept": (
        "added_to_optimizer are_later_rounds are_updated_alike assignments averaged_array chooses_parameters "
        "is_bound_by_choice is_computed_in_rounds is_filled_once is_target_in_rounds set_by_call"
    ),
    "flow.members": "container_of is_mapped is_taken_for_copy is_walked_over put_back shared_member",
    "flow.modules": "DETACHED Shape inplace_layer_false state_given",
    "flow.reaching": "is_of_copy runs_more_often",
    "flow.reuse": "SecondName argument_read_later is_made_in_round second_name",
    "flow.results": (
        "cached_function collected_result computed_defaults dropped_update earlier_result element_named is_in_loop "
        "is_running_state line_adding lines_reading names_unpacked one_many_times parameter_names read_behind "
        "times_in_list"
    ),
    "flow.rounds": (
        "bound_each_round clears_between detach_after detach_after_round frames_between in_one_loop in_same_function "
        "in_same_loops is_item_of_loop is_target_of_loop is_read_afterwards is_read_between reads_what_it_binds "
        "shape_bound_at walked_over"
    ),
    "flow.scopes": "Live is_global_here is_in_function_forward",
    "flow.targets": (
        "Operation assigned_data called_operand mixed_operand operand_expressions operation_at own_difference "
        "target_and_operand written_expression"
    ),
    "flow.writing": (
        "Made attribute_owner computes_with_result definition_of given_to_optimizer is_computed_with is_of_itself "
        "number_given reads_from reads_gradient scaled_before writing_at"
    ),
    "identifiers": "assigned_names consumed_names",
    "intent.additions": "Addition additions",
    "imports": "with_imports",
    "intent.attributes": "bound_in_class cuts_of_returned_loss uses_in",
    "intent.conditions": (
        "clears_its_condition compared_scores context_around enter_each_round enter_once_more is_called_with_graph "
        "is_checked is_conditional kept_as_best values_kept_as_best"
    ),
    "intent.contents": (
        "adds_noise detached_for_copy elements_updated_by is_computed_by_program is_shifted_by_neighbours is_labelled "
        "is_state_of_loader is_left_to_caller makes_discrete operand_given spoils_data writes_at_random"
    ),
    "intent.flags": (
        "Flag drops_result flags_set measures_gradients reads_flag reads_gradients reads_scale reads_value_of "
        "sets_gradients sets_own_flag told_to_require writes_into_result"
    ),
    "intent.gradients": (
        "clears_each_part draws_both is_loss_read_elsewhere kept_gradient left_out reads_gradient_beside "
        "steps_in_some_rounds unreturned_gradient"
    ),
    "joined": "on_own_lines",
    "locate": (
        "Expression Statement expression_at expressions_at is_argument is_call_alone names_in_function statement_at"
    ),
    "rewrite.asked": (
        "differentiated floating_from_start gradient_in_shape graph_for_gradient input_itself is_differentiated_later "
        "keep_graph_from passed_gradient_in_shape retained sum_differentiated wanted_where_bound"
    ),
    "rewrite.checkpointed": "bind_early passed_to_method rebound_at",
    "rewrite.copied": (
        "buffer_of_copy clone_argument clone_given clone_handed_out clone_source copy_second_name copy_where_bound "
        "handed_out parameter_of_copy"
    ),
    "rewrite.detached": (
        "detach_after_yield detach_by_own detach_own_reads detach_own_state detach_reads detach_unread is_repeated "
        "read_as_data taken_from walked_values"
    ),
    "rewrite.filled": (
        "all_under_no_grad cut_before_written detach_behind_loop own_name_in_forward reads_filled second_name_anew"
    ),
    "rewrite.functions": (
        "copy_element_kept copy_saved_early earlier_reads gradients_for_inputs kept_on_context mark_dirty name_kept "
        "save_for_backward saved_early without_once_differentiable"
    ),
    "rewrite.given": "copies_parameter kept_without_gradient may_step steps_one_of switch_on_before_made",
    "rewrite.leaves": (
        "assigned_as_parameter assigned_by_copy assigned_in_place attribute_assigned leaf_alone read_instead "
        "reads_later written_behind"
    ),
    "rewrite.listing": "list_and_stack rebuilt_list",
    "rewrite.moving": "bound_names move_behind within_block",
    "rewrite.numerics.bounded": "operand_text",
    "rewrite.numerics.finite": "FiniteForm finite_forms",
    "rewrite.out_of_place": (
        "argument_out_of_place out_of_place recorded result_out_of_place runs_again_after_backward "
        "runs_again_on_result written_for_caller written_for_others"
    ),
    "rewrite.renewing": "computed_before_rounds run_again run_again_for_next_round run_again_for_state view_again",
    "rewrite.scatter": "element_out_of_place part_out_of_place",
    "rewrite.stepping": (
        "backward_of_sum backward_to_its_step called_step_behind is_only_backward later_backward_to_its_step "
        "step_by_scaler steps_without_backward"
    ),
    "rewrite.parts": "named_parts_joined parts_collected",
    "rewrite.suggest": (
        "clone_at_save clone_before detach_at drop_keyword has_keyword inplace_false mean_where_made read_gradients "
        "require_grad_of switch_on_before"
    ),
    "rewrite.cuts.entered": "begins_without_tensor detached_on_entry emptied_on_entry",
    "rewrite.cuts.undone": "flag_before_use graph_restored undone undone_numbers with_gradients",
    "rewrite.cuts.uncut": "Uncut cut_at_use detach_compared detach_given detach_held read_with_graph term_uncut",
    "rewrite.cuts.unrecorded": "recorded_by_name",
    "rewrite.updates": "is_put_back stands_before_its_backward steps_again under_no_grad updated_in_place",
    "tree": "is_cell source_line source_lines",
}

_HOMES = {module: tuple(names.split()) for module, names in _NAMES.items()}

__getattr__ = names_on_demand(__name__, _HOMES)
