"""The catalogue's patterns: against what the installed torch raises, and against the words of other versions."""

import importlib.util
import json
import runpy
import warnings
from pathlib import Path

import pytest
import torch

import gradsan
from cases import each
from forked import call_forked
from gradsan.catalogue import place_raised, recognise, rows

TOOL = Path(__file__).parent.parent.parent / "tools" / "wordings.py"
spec = importlib.util.spec_from_file_location("wordings", TOOL)
wordings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wordings)

PROGRAMS = Path(__file__).parent.parent / "errors" / "programs"

RAISED_BY = {
    "apply_on_parameter": "apply_requires_grad",
    "cached_overwritten": "cached_overwritten",
    "checkpoint_backward_in_region": "hooks_disabled",
    "checkpoint_fewer_saves": "checkpoint_count",
    "checkpoint_reentrant_grad": "checkpoint_reentrant_grad",
    "checkpoint_shape_changed": "checkpoint_metadata",
    "checkpoint_unpacked_twice": "checkpoint_unpacked_twice",
    "checkpoint_without_gradient": "checkpoint_needless",
    "chunk_saved_then_base_written": "multi_view_base_written",
    "chunk_used_after_write": "multi_view_base_written",
    "compiled_backward_writes": "compiled_backward_writes",
    "compiled_buffers_donated": "donated_buffers",
    "compiled_inputs_detached": "compiled_inputs_share",
    "compiled_inputs_reinterpreted": "compiled_inputs_share",
    "compiled_layers": "compiled_version_error",
    "compiled_leaf_written": "leaf_inplace",
    "compiled_result_overwritten": "compiled_version_error",
    "custom_op_returns_input": "custom_op_aliases",
    "data_incompatible": "data_incompatible",
    "data_not_floating": "data_not_floating",
    "data_viewed_by_function": "function_view_inplace",
    "dirty_not_returned": "dirty_not_returned",
    "dirty_view_of_several": "dirty_view_of_several",
    "dlpack_of_parameter": "export_requires_grad",
    "expanded_written": "memory_overlap",
    "expanded_written_by_mask": "memory_overlap",
    "expanded_written_in_turn": "memory_overlap",
    "flag_of_integer": "flag_of_integer",
    "flag_of_result": "flag_of_result",
    "hooks_in_forbidden_region": "hooks_disabled",
    "hooks_on_freed": "hooks_on_freed",
    "hooks_on_none": "hooks_on_none",
    "hooks_set_again": "hooks_set_again",
    "hooks_under_transform": "hooks_under_transform",
    "inference_requires_grad": "inference_requires_grad",
    "inference_saved": "inference_saved",
    "inference_version": "inference_version",
    "inference_written": "inference_written",
    "leaf_filled_at_start": "leaf_view_inplace",
    "leaf_in_checkpoint": "leaf_inplace",
    "leaf_in_computation": "leaf_inplace",
    "leaf_marked_dirty": "leaf_marked_dirty",
    "leaf_updated_by_hand": "leaf_inplace",
    "module_hook_and_inplace": "function_view_inplace",
    "mutation_context_left": "mutation_context_left",
    "mutation_contexts_nested": "mutation_contexts_nested",
    "negative_slope": "negative_slope",
    "numpy_of_parameter": "numpy_requires_grad",
    "out_argument": "out_requires_grad",
    "pack_hook_writes": "pack_hook_writes",
    "parameter_assigned": "parameter_assigned",
    "parameter_result": "parameter_result",
    "reduced_twice": "ready_twice",
    "reduction_unfinished": "reduction_unfinished",
    "region_inside_hooks": "hooks_disabled",
    "resized": "resize_requires_grad",
    "result_dtype": "result_dtype",
    "result_of_leaf_optimized": "result_optimized",
    "result_optimized": "result_optimized",
    "result_shape": "result_shape",
    "rows_of_plain_memory": "multi_view_inplace",
    "rows_scaled_in_turn": "multi_view_inplace",
    "saved_detached": "saved_detached",
    "saved_read_twice": "saved_read_twice",
    "sharded_after_inference": "sharded_after_inference",
    "sharded_called_past": "sharded_called_past",
    "sharded_changed_between": "sharded_changed_between",
    "sharded_flags_differ": "sharded_flags_differ",
    "sharded_gathered_inside": "sharded_gathered_inside",
    "sharded_second_order": "sharded_second_order",
    "sharded_shape_changed": "sharded_shape_changed",
    "shifted_sum": "source_overlap",
    "state_deepcopied": "deepcopy_of_result",
    "transform_writes_captured": "transform_writes_captured",
    "undeclared_mutation": "undeclared_mutation",
    "undeclared_mutation_checked": "undeclared_mutation_checked",
    "unpack_hook_number": "unpack_hook_result",
    "unrecorded_view_of_written_base": "unrecorded_view_base_written",
    "view_detached": "view_detached",
    "view_from_function": "function_view_inplace",
    "view_from_inference_mode": "unrecorded_view_inplace",
    "view_from_no_grad": "unrecorded_view_inplace",
    "view_same_as_base": "view_same_as_base",
    "view_with_history": "view_with_history",
    "vmap_writes_smaller": "vmap_writes_smaller",
}

# (row, kind, message as other versions word it, groups)
RECORDED = [
    (
        "cudagraph_overwritten",
        "RuntimeError",
        "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run. Stack trace: File "
        '"train.py", line 12, in forward\n    return self.out(x). To prevent overwriting, clone the tensor outside of '
        "torch.compile() or call torch.compiler.cudagraph_mark_step_begin() before each model invocation.",
        {},
    ),
    (
        "multi_view_inplace",
        "RuntimeError",
        "Output 0 of UnbindBackward0 is a view and is being modified inplace. This view is the output of a function "
        "that returns multiple views. Such functions do not allow the output views to be modified inplace. You should "
        "replace the inplace operation by an out-of-place one.",
        {"output": "0", "op": "UnbindBackward0"},
    ),
    (
        "multi_view_base_written",
        "RuntimeError",
        "Output 1 of SplitBackward0 is a view and its base or another view of its base has been modified inplace. This "
        "view is the output of a function that returns multiple views.",
        {"output": "1", "op": "SplitBackward0"},
    ),
    (
        "function_view_inplace",
        "RuntimeError",
        "Output 0 of BackwardHookFunctionBackward is a view and is being modified inplace. This view was created "
        "inside a custom Function (or because an input was returned as-is) and the autograd logic to handle "
        "view+inplace would override the custom backward associated with the custom Function, leading to incorrect "
        "gradients.",
        {"output": "0", "op": "BackwardHookFunctionBackward"},
    ),
    (
        "unrecorded_view_inplace",
        "RuntimeError",
        "Output 0 of SliceBackward0 is a view of a view which was created in no_grad mode and is being modified "
        "inplace with grad mode enabled.",
        {"output": "0", "op": "SliceBackward0", "mode": "no_grad"},
    ),
    (  # 2.6 to 2.12; the later words are raised by the installed torch
        "unused_in_graph",
        "RuntimeError",
        "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this "
        "is the desired behavior.",
        {},
    ),
    (  # 2.13 on
        "unused_in_graph",
        "RuntimeError",
        "The differentiated Tensor at index 1 appears to not have been used in the graph.",
        {"index": "1"},
    ),
    (  # 2.6
        "compiled_backward_writes",
        "BackendCompilerFailed",
        "backend='aot_eager' raised:\nAssertionError: Found an input to the backward that was mutated during the "
        "backward pass. This is not supported",
        {},
    ),
    (
        "inference_saved",
        "RuntimeError",
        "Inference tensors cannot be saved for backward. To work around you can make a clone to get a normal tensor "
        "and use it in autograd.",
        {},
    ),
]


def row_raised(program):
    """The catalogue's row for what a program raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The class of torch.library's checks takes seconds to import.
        with pytest.raises(Exception) as caught:
            runpy.run_path(str(PROGRAMS / f"{program}.py"))
    kinds = [kind.__name__ for kind in type(caught.value).__mro__]
    found = recognise(kinds, str(caught.value), place_raised(caught.value))
    return found and found[0].slug


@each(("program", "row"), sorted(RAISED_BY.items()))
def test_messages_raised_by_this_torch_match(program, row):
    makes_group = '"gloo"' in (PROGRAMS / f"{program}.py").read_text(encoding="utf-8")
    assert (call_forked(row_raised, program) if makes_group else row_raised(program)) == row


def test_words_of_the_programs_own_are_known_by_their_place_only():
    def refused():
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"), torch.autograd.graph.save_on_cpu():
            pass

    with pytest.raises(RuntimeError, match="not here") as caught:
        refused()
    assert recognise(["RuntimeError"], "not here", place_raised(caught.value))[0].slug == "hooks_disabled"
    assert recognise(["RuntimeError"], "not here") is None
    with pytest.raises(RuntimeError) as raised, torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        raise RuntimeError("not here")
    assert recognise(["RuntimeError"], "not here", place_raised(raised.value)) is None


@each(("row", "kind", "message", "groups"), RECORDED, ids=lambda value: str(value)[:30])
def test_wordings_of_other_versions_match(row, kind, message, groups):
    found = recognise([kind, "Exception"], message)
    assert found is not None
    assert (found[0].slug, dict(found[1])) == (row, groups)


@each(
    ("kind", "message"),
    [
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        (
            "RuntimeError",
            "one of the variables needed for gradient computation has been modified by an inplace operation",
        ),
        ("ValueError", "a leaf Variable that requires grad is being used in an in-place operation."),
        ("KeyError", "'weight'"),
    ],
)
def test_messages_of_others_match_no_pattern(kind, message):
    assert recognise([kind, "Exception"], message) is None


def test_every_row_is_whole():
    for row in rows():
        assert bool(row.patterns) != bool(row.raised_in)
        assert row.raised_as.isidentifier()


def test_a_message_of_the_programs_own_gets_no_diagnosis():
    with pytest.raises(RuntimeError, match="no such thing"), gradsan.watch() as watch:
        raise RuntimeError("no such thing")
    assert watch.diagnoses == ()


TABLE = json.loads((Path(__file__).parent / "wordings.json").read_text(encoding="utf-8"))
OLDEST = "2.6.0"
# Put together from pieces too short to be found in every build, or looked for in few of them; programs of tests/errors
# raise them here.
PUT_TOGETHER = {
    "custom_backward_shape",
    "function_view_inplace",
    "multi_view_base_written",
    "parameter_assigned",
    "unrecorded_view_base_written",
    "unrecorded_view_inplace",
}
OLDER = {"checkpoint_reentrant_grad/1"}
# Rows of a later version than the oldest: what is new, and what says it since.
LATER = {
    row
    for row in {key.partition("/")[0] for key in TABLE}
    if not any(OLDEST in versions for key, versions in TABLE.items() if key.partition("/")[0] == row)
}


def test_the_table_knows_every_pattern():
    assert sorted(TABLE) == sorted(f"{row.slug}/{at}" for row in rows() for at in range(len(row.patterns)))


def test_every_pattern_is_said_by_some_version():
    silent = {key for key, versions in TABLE.items() if not versions}
    assert {key for key in silent if key.partition("/")[0] not in PUT_TOGETHER} == OLDER


def test_messages_missing_in_the_oldest_version_are_listed():
    assert {"dirty_not_input", "saved_read_twice"} == LATER - PUT_TOGETHER


def test_every_row_is_said_by_the_newest_version():
    newest = max((one for versions in TABLE.values() for one in versions), key=lambda one: [*map(int, one.split("."))])
    said = {key.partition("/")[0] for key, versions in TABLE.items() if newest in versions}
    assert said | PUT_TOGETHER == {row.slug for row in rows() if row.patterns}


@pytest.mark.long
def test_the_table_is_right_for_the_installed_version():
    version = torch.__version__.partition("+")[0]
    if not any(version in versions for versions in TABLE.values()):
        pytest.skip(f"the table does not know torch {version}")
    wanted = wordings.pieces()
    found = wordings.found_in(wordings.wheel_files(Path(torch.__file__).parent.parent), wanted)
    known = {key for key, versions in TABLE.items() if version in versions}
    assert {key for key in found ^ known if key.partition("/")[0] not in PUT_TOGETHER} == set()
