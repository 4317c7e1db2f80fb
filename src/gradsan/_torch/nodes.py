"""Autograd Nodes: their number, their slots, what they keep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradsan._torch.hooks import has_hooks
from gradsan._torch.kinds import sizes_of, type_of
from gradsan._torch.modes import hushed, is_transformed, without_dispatch_modes
from gradsan._torch.saved import packed_object, saved_tensor, tensor_refused

# The number the next autograd Node of this thread will carry. Missing: 0, and the order of nodes and writes is unknown.
sequence_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)


# The Node whose backward runs in this thread. Missing: None, and the operation that saved a tensor stays unnamed.
current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)


@functools.lru_cache(maxsize=4096)
def _slot_names(kind: Any) -> tuple[str, ...]:
    """The names of the ``_raw_saved_*`` attributes of a class of Nodes; of a custom Function's there is one list."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_slots(node: Any) -> Iterator[tuple[str, Any]]:
    """(slot name, SavedTensor or what stands for one) of every saved tensor of a Node; list slots come as ``name[i]``.

    A custom Function has one list, ``saved_tensors``. Nodes such as CopySlices and the foreach nodes show none. A slot
    already freed is left out.
    """
    kind: Any = type(node)
    for attribute in _slot_names(kind):
        try:
            value = getattr(node, attribute)
        except RuntimeError:
            continue
        slot = attribute[len("_raw_saved_") :]
        # Asked of the class: a Node reads its saved tensors to answer, and raises where one is stale.
        slot = "saved_tensors" if slot == "tensors" and hasattr(kind, "saved_tensors") else slot
        name = _attribute_of(slot)
        if isinstance(value, (tuple, list)):
            for position, item in enumerate(value):
                if item is not None:
                    yield f"{slot}[{position}]", saved_tensor(node, name, position, item)
        elif value is not None:
            yield slot, saved_tensor(node, name, None, value)


def slots_of_function(node: Any) -> tuple[Any, ...]:
    """The SavedTensors of a custom Function, one for each tensor that it saved. Missing: empty."""
    try:
        return tuple(node._raw_saved_tensors or ())
    except (RuntimeError, AttributeError):
        return ()


def read_slot(node: Any, slot: str) -> Any:
    """What backward would get from a slot (``name`` of :func:`saved_slots`, a list as a whole), checked as there."""
    return getattr(node, _attribute_of(slot))


def refused_tensor(node: Any, slot: str, one: Any) -> Any:
    """The tensor of a slot (as of :func:`saved_slots`) of which reading raises the version error.

    None where it is not this member of a list that raises, or where it cannot be decided.
    """
    name, _, position = slot.partition("[")
    return tensor_refused(node, _attribute_of(name), int(position.rstrip("]")) if position else None, one)


def _attribute_of(slot: str) -> str:
    return slot if slot == "saved_tensors" else f"_saved_{slot}"


def hides_saves(node: Any) -> bool:
    """Whether a Node may have saved tensors that Python cannot see.

    CopySlices, and C++ Nodes without a class of their own: those of ``_foreach_`` operations and of extensions.
    """
    return is_copy_slices(node) or type(node).__name__ == "CppFunction"


def is_custom_node(node: Any) -> bool:
    """Whether a Node runs Python code of an ``autograd.Function``."""
    return isinstance(node, torch._C._FunctionBase)


def is_copy_slices(node: Any) -> bool:
    """Whether a Node stands for an in-place operation on a view."""
    return type(node).__name__ == "CopySlices"


def was_freed(node: Any) -> bool:
    """Whether a Node that shows its slots has run and let go of what it had saved."""
    if any(packed_object(saved) is not None for _, saved in saved_slots(node)):
        return False
    kind: Any = type(node)
    for attribute in _slot_names(kind):
        slot = "saved_tensors" if hasattr(kind, "saved_tensors") else attribute[len("_raw_saved_") :]
        try:
            read_slot(node, slot)
        except RuntimeError as error:
            if "a second time" in str(error):
                return True
    return False


def is_refused(tensor: Any) -> bool:
    """Whether ``tensor`` is a view that PyTorch gives no grad_fn any more, because its base was written."""
    try:
        tensor.grad_fn  # noqa: B018 - asking is what raises
    except RuntimeError:
        return True
    return False


def node_sequence(node: Any) -> int | None:
    """A Node's sequence number: creation order within a thread. None for AccumulateGrad, which has none."""
    number: int = node._sequence_nr()
    return None if number >= 2**63 else number


def is_behind(node: Any, roots: tuple[Any, ...]) -> bool:
    """Whether a backward from ``roots`` would come to ``node``."""
    waiting, seen = list(roots), set(roots)
    while waiting:
        at = waiting.pop()
        if at is node:
            return True
        children = {child for child, _ in at.next_functions if child is not None} - seen
        seen |= children
        waiting += children
    return False


def output_info(node: Any, output: int) -> tuple[tuple[int, ...], str, str] | None:
    """(shape, dtype, device) of one of the tensors that a Node made. Missing: None, and only its name is shown."""
    try:
        found = node._input_metadata[output]
        return tuple(int(size) for size in found.shape), str(found.dtype).removeprefix("torch."), str(found.device)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None


def count_of_outputs(node: Any) -> int:
    """How many tensors a Node made, so how many gradients it takes. Missing: 0, and it is given those there are."""
    return len(getattr(node, "_input_metadata", ()))


def kind_of_output(node: Any, output: int) -> tuple[tuple[int, ...], Any] | None:
    """(shape, dtype) of one of the tensors that a Node made. Missing: None, and gradients are taken as they come.

    Raises:
        RuntimeError: where that is a nested tensor, which has no such shape.
    """
    found = getattr(node, "_input_metadata", ())
    if output >= len(found):
        return None
    return tuple(int(size) for size in found[output].shape), found[output].dtype


def hands_gradients_through(function: Any) -> bool:
    """Whether a custom Function is the one by which modules get backward hooks: gradients pass it unchanged.

    Missing: False, and such graphs are not measured.
    """
    return function is getattr(torch.nn.modules._functions, "BackwardHookFunction", None)


def saved_number(node: Any, name: str) -> float | None:
    """A number that a Node keeps, such as ``negative_slope``. Missing: None, and the Node is not recognised by it."""
    found = getattr(node, f"_saved_{name}", None)
    return float(found) if isinstance(found, int | float) else None


def slot_of(node: Any, packed: Any) -> str | None:
    """The slot of a Node whose pack hook returned ``packed``."""
    if node is None:
        return None
    return next((slot for slot, saved in saved_slots(node) if packed_object(saved) is packed), None)


def is_read_by_backward(node: Any, slot: str | None) -> bool:
    """Whether backward reads what stands in a slot.

    Batch norm saves its running statistics in training too, where its backward goes by the batch's own (the formula of
    native_batch_norm in derivatives.yaml); the kernel updates them right after the save. Pooling, padding and some
    others save what they are given for its sizes alone.
    """
    if slot in ("self", "source"):
        return not (node is not None and node.name() in _SAVED_FOR_SIZES and _is_of_known_kernels(node))
    if slot not in ("running_mean", "running_var"):
        return True
    if node is not None and node.name().startswith("BatchNormWithUpdate"):
        return False
    return not any(getattr(node, name, False) is True for name in ("_saved_training", "_saved_train", "_saved_update"))


_SAVED_FOR_SIZES = frozenset(
    f"{name}Backward0"
    for name in (
        *("AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "AvgPool2D", "AvgPool3D"),
        *("FractionalMaxPool2D", "FractionalMaxPool3D", "MaxPool2DWithIndices", "MaxPool3DWithIndices"),
        *("ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D"),
        *("ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D"),
        *("FftR2C", "Gather", "IndexAdd", "IndexCopy", "NllLoss", "NllLoss2D"),
    )
)


def _is_of_known_kernels(node: Any) -> bool:
    """Whether CPU or CUDA computed it: other devices have kernels that pool the saved input once more."""
    made = output_info(node, 0)
    return made is not None and made[2].partition(":")[0] in ("cpu", "cuda", "meta")


def is_filled_after_save(node: Any, slot: str | None) -> bool:
    """Whether the kernel fills a slot that was saved before it ran: the noise of rrelu, which nothing else writes."""
    return slot == "noise" and type(node).__name__.startswith("RreluWithNoise")


DETACHED = (
    "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_()."
    "This is not supported, please use out-of-place `.detach()` instead"
)
"""What PyTorch says of a saved tensor that has lost its graph (saved_variable.cpp)."""


def may_be_saving(maker: Any, number: int | None) -> bool:
    """Whether ``maker``, the Node that made a tensor which is being saved, is or may be the one that saves it.

    To hold such a tensor itself would close a circle. The Node that saves is the latest of this thread; of the Nodes of
    one call on a list, and of a custom Function that has made Nodes of its own, that is not known.
    """
    return number == sequence_number() - 1 or function_class(maker) is not None or hides_saves(maker)


_HINT = ". Hint: "
_names_nodes_in_full: list[bool] = []
_hints: dict[bool, str] = {
    False: "enable anomaly detection to find the operation that failed to compute its gradient, with "
    "torch.autograd.set_detect_anomaly(True, check_nan=False).",
    True: "the backtrace further above shows the operation that failed to compute its gradient. The variable in "
    "question was changed in there or anywhere later. Good luck!",
}
"""What the version error ends with, by whether anomaly mode is on."""


def learn_words() -> None:
    """Read off an error how this torch's version error names a Node (``Exp``, or in full as before 2.13) and ends.

    To be called where no hooks are entered, as these turn the check off; else it is worded as the newest does.
    """
    if _names_nodes_in_full or has_hooks() or is_transformed():
        return
    with hushed(), without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
        result = torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu").exp()
        with torch.no_grad():
            result.zero_()
        try:
            read_slot(result.grad_fn, "result")
        except RuntimeError as error:
            _names_nodes_in_full.append("ExpBackward0" in str(error))
            _, found, hint = str(error).partition(_HINT)
            if found:
                _hints[torch.is_anomaly_enabled()] = hint


def version_error(tensor: Any, saved: int, maker: Any, number: int) -> str:
    """What PyTorch says where the version of ``tensor`` is not the one ``saved`` (saved_variable.cpp:167-197).

    ``maker`` is the Node that made it, ``number`` the number of its output where it saved that itself, else 0.
    """
    op = "" if maker is None else maker.name()
    if not any(_names_nodes_in_full):
        op = op.removesuffix("0").removesuffix("Backward")
    output = f", which is output {number} of {op}," if op else ""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{type_of(tensor)} {sizes_of(tensor)}]{output} is at version {tensor._version}; "
        f"expected version {saved} instead{_HINT}{_hints[torch.is_anomaly_enabled()]}"
    )


def function_class(node: Any) -> Any:
    """The custom Function whose Node this is; None for every other Node, and where the name is missing."""
    return getattr(type(node), "_forward_cls", None)


def are_read(packed: list[Any]) -> bool:
    """Whether the backward that runs reads one of what pack hooks have returned.

    Their Nodes are looked for from the running one on; where one is not found, it is thought to be read.
    """
    wanted = {id(one) for one in packed if one is not None}
    running = current_node()
    waiting, seen = ([running] if running is not None else []), set[Any]()
    while waiting and wanted and len(seen) < _NODES_SEARCHED:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for slot, saved in saved_slots(node):
            held = packed_object(saved)
            key = id(getattr(held, "packed", held))
            if key in wanted:
                wanted.discard(key)
                if is_read_by_backward(node, slot) and not is_filled_after_save(node, slot):
                    return True
        waiting += [child for child, _ in node.next_functions if child is not None]
    return bool(wanted)


_NODES_SEARCHED = 10_000


def makes_view(node: Any) -> bool:
    """Whether a Node stands for an operation that makes a view, by its name."""
    name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
    return name in _VIEWS


_VIEWS = frozenset(
    {
        *("Alias", "AsStrided", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
        *("SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "Unfold", "Unsqueeze", "View"),
    }
)


def anomaly_stack(node: Any) -> list[str]:
    """The stack at which a Node was made, as ``traceback.format_stack`` writes it, where anomaly mode was on then.

    Missing: empty, and the place is read off the source.
    """
    try:
        lines = node.metadata.get("traceback_", ())
    except (AttributeError, RuntimeError):
        return []
    return [line for line in lines if isinstance(line, str)]
