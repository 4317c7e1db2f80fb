"""Autograd Nodes: sequence number, saved-tensor slots, version error, outputs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.autograd.graph import Node

from gradsan._collector import cached_by_class
from gradsan._torch.hooks import has_hooks
from gradsan._torch.kinds import sizes_of, type_of
from gradsan._torch.modes import hushed, is_transformed, without_dispatch_modes
from gradsan._torch.saved import packed_object, saved_tensor, tensor_refused

# The number of the next autograd Node of this thread. Missing: 0, and the order of Nodes and writes is unknown.
sequence_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)


def sequence_number_address() -> int:
    """The address of the C++ function behind :data:`sequence_number`, ``at::sequence_number::peek() -> uint64_t``.

    The native core, which asks before and after each operation, calls it directly: by way of Python this was 60 % of
    the instructions that watching added to a step of many small layers. Missing, or where it does not answer like
    :data:`sequence_number`: 0, and the core asks that one.
    """
    flags = getattr(os, "RTLD_NOLOAD", None)
    if flags is None:
        return 0
    for name in ("libtorch_cpu.so", "@rpath/libtorch_cpu.dylib"):
        try:
            peek = ctypes.CDLL(name, mode=flags | os.RTLD_LAZY)._ZN2at15sequence_number4peekEv
        except (OSError, AttributeError):
            continue
        peek.restype = ctypes.c_uint64
        if peek() == sequence_number():
            return ctypes.cast(peek, ctypes.c_void_p).value or 0
    return 0


# The Node whose backward runs in this thread. Missing: None, and the operation that saved a tensor has no name.
current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)


@cached_by_class
def _slot_names(kind: Any) -> tuple[str, ...]:
    """The names of the ``_raw_saved_*`` attributes of a class of Nodes; a custom Function has one list."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_slots(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield (slot name, SavedTensor or its stand-in) of every saved tensor of a Node; list slots are named ``name[i]``.

    A custom Function has one list, ``saved_tensors``. Nodes such as CopySlices and the foreach nodes show none. A freed
    slot is left out.
    """
    kind: Any = type(node)
    for attribute in _slot_names(kind):
        try:
            value = getattr(node, attribute)
        except RuntimeError:
            continue
        slot = attribute[len("_raw_saved_") :]
        # Asked of the class: on a Node, hasattr would read the saved tensors, and raise where one is stale.
        slot = "saved_tensors" if slot == "tensors" and hasattr(kind, "saved_tensors") else slot
        name = _attribute_of(slot)
        if isinstance(value, (tuple, list)):
            for position, item in enumerate(value):
                if item is not None:
                    yield f"{slot}[{position}]", saved_tensor(node, name, position, item)
        elif value is not None:
            yield slot, saved_tensor(node, name, None, value)


def slots_of_function(node: Node) -> tuple[Any, ...]:
    """Return the SavedTensors of a custom Function, one for each tensor that it saved. Missing: empty."""
    try:
        return tuple(getattr(node, "_raw_saved_tensors", None) or ())
    except (RuntimeError, AttributeError):
        return ()


def read_slot(node: Node, slot: str) -> Any:
    """Return the value that backward would get from a slot (a list as a whole), with its version check."""
    return getattr(node, _attribute_of(slot))


def refused_tensor(node: Node, slot: str, one: Any) -> Any:
    """Return the tensor of a slot (as of :func:`saved_slots`) whose reading raises the version error.

    None where another member of the list raises, or where it cannot be decided.
    """
    name, _, position = slot.partition("[")
    return tensor_refused(node, _attribute_of(name), int(position.rstrip("]")) if position else None, one)


def _attribute_of(slot: str) -> str:
    return slot if slot == "saved_tensors" else f"_saved_{slot}"


def hides_saves(node: Node) -> bool:
    """Whether a Node may have saved tensors that Python cannot see.

    CopySlices, and C++ Nodes without a class of their own: those of ``_foreach_`` operations and of extensions.
    """
    return is_copy_slices(node) or type(node).__name__ == "CppFunction"


def is_custom_node(node: Node) -> bool:
    """Whether a Node runs Python code of an ``autograd.Function``."""
    return isinstance(node, torch._C._FunctionBase)


def is_copy_slices(node: Node) -> bool:
    """Whether a Node represents an in-place operation on a view."""
    return type(node).__name__ == "CopySlices"


def was_freed(node: Node) -> bool:
    """Whether a Node that shows its slots has run and freed its saved tensors."""
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


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """Return the Node of a tensor that a call has read or returned, without renewing it.

    PyTorch renews ``grad_fn`` of a view whose base was written when it is asked for, and then allows a write to the
    view that it would have refused. What is read while autograd records is renewed by PyTorch itself; elsewhere the
    Node of its base stands for such a view.
    """
    if not torch.is_grad_enabled() and tensor._base is not None and is_view_of_written(tensor):
        return tensor._base.grad_fn
    return tensor.grad_fn


def is_trainable_leaf(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a leaf that requires grad; asking ``is_leaf`` renews a ``grad_fn``, too."""
    return tensor.requires_grad and not is_view_of_written(tensor) and tensor.is_leaf


def is_view_of_written(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a view of a base with a graph that was written, so that its ``grad_fn`` may be renewed."""
    base = tensor._base
    return base is not None and bool(base.requires_grad and base._version)


def is_refused(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a view that PyTorch refuses a grad_fn, because its base was written."""
    try:
        tensor.grad_fn  # noqa: B018 - asking is what raises
    except RuntimeError:
        return True
    return False


def node_sequence(node: Node | None) -> int | None:
    """Return a Node's sequence number: creation order within a thread. AccumulateGrad has none; nor has no Node."""
    if node is None:
        return None
    number: int = node._sequence_nr()
    return None if number >= 2**63 else number


def is_behind(node: Node, roots: tuple[Node, ...]) -> bool:
    """Whether a backward from ``roots`` would reach ``node``."""
    waiting, seen = list(roots), set(roots)
    while waiting:
        at = waiting.pop()
        if at is node:
            return True
        children = {child for child, _ in at.next_functions if child is not None} - seen
        seen |= children
        waiting += children
    return False


def output_info(node: Node, output: int) -> tuple[tuple[int, ...], str, str] | None:
    """Return (shape, dtype, device) of an output of a Node. Missing: None, and only its name is shown."""
    try:
        found = node._input_metadata[output]
        return tuple(int(size) for size in found.shape), str(found.dtype).removeprefix("torch."), str(found.device)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None


def count_of_outputs(node: Node) -> int:
    """Return the number of a Node's outputs, and so of the gradients it takes. Missing: 0, it gets those there are."""
    return len(getattr(node, "_input_metadata", ()))


def kind_of_output(node: Node, output: int) -> tuple[tuple[int, ...], Any] | None:
    """Return (shape, dtype) of an output of a Node. Missing: None, and gradients are taken unchecked.

    Raises:
        RuntimeError: if it is a nested tensor, which has no such shape.
    """
    found = getattr(node, "_input_metadata", ())
    if output >= len(found):
        return None
    return tuple(int(size) for size in found[output].shape), found[output].dtype


def hands_gradients_through(function: Any) -> bool:
    """Whether a custom Function is the one that gives modules backward hooks: gradients pass it unchanged.

    Missing: False, and such graphs are not measured.
    """
    return function is getattr(torch.nn.modules._functions, "BackwardHookFunction", None)


def saved_number(node: Node, name: str) -> float | None:
    """Return a number that a Node keeps, such as ``negative_slope``. Missing: None, and the Node is not recognised."""
    found = getattr(node, f"_saved_{name}", None)
    return float(found) if isinstance(found, int | float) else None


def slot_of(node: Node, packed: Any) -> str | None:
    """Return the slot of a Node whose pack hook returned ``packed``."""
    if node is None:
        return None
    return next((slot for slot, saved in saved_slots(node) if packed_object(saved) is packed), None)


def is_read_by_backward(node: Node, slot: str | None) -> bool:
    """Whether backward reads the value of a slot.

    Batch norm saves its running statistics in training too, where its backward uses those of the batch (the formula of
    native_batch_norm in derivatives.yaml); the kernel updates them right after the save. Pooling, padding and some
    others save their input for its sizes alone.
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


def _is_of_known_kernels(node: Node) -> bool:
    """Whether CPU or CUDA computed it: kernels of other devices may pool the saved input again."""
    made = output_info(node, 0)
    return made is not None and made[2].partition(":")[0] in ("cpu", "cuda", "meta")


def is_filled_after_save(node: Node, slot: str | None) -> bool:
    """Whether the kernel fills a slot that was saved before it ran: the noise of rrelu, which nothing else writes."""
    return slot == "noise" and type(node).__name__.startswith("RreluWithNoise")


DETACHED = (
    "Trying to use a saved tensor that has been detached in-place, i.e. with .detach_()."
    "This is not supported, please use out-of-place `.detach()` instead"
)
"""PyTorch's error for a saved tensor that has lost its graph (saved_variable.cpp)."""


def may_be_saving(maker: Any, number: int | None) -> bool:
    """Whether ``maker``, the Node that made a tensor being saved, is or may be the one that saves it.

    Keeping such a tensor itself would create a reference cycle. The Node that saves is the latest of this thread; for
    the Nodes of a call on a list, and for a custom Function that has made Nodes of its own, that is unknown.
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
"""The end of the version error, by whether anomaly mode is on."""


def learn_words() -> None:
    """Learn from an error how this torch's version error names a Node (``Exp``, or in full as before 2.13) and ends.

    Call it where no hooks are active, as these turn the check off; otherwise the newest wording is used.
    """
    if _names_nodes_in_full or has_hooks() or is_transformed():
        return
    with hushed(), without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
        result = torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu").exp()
        with torch.no_grad():
            result.zero_()
        try:
            read_slot(cast("Node", result.grad_fn), "result")
        except RuntimeError as error:
            _names_nodes_in_full.append("ExpBackward0" in str(error))
            _, found, hint = str(error).partition(_HINT)
            if found:
                _hints[torch.is_anomaly_enabled()] = hint


def slot_of_own_result(op: str) -> tuple[str, str] | None:
    """Return (Node, slot) where an in-place operation saves what it wrote: ``exp_``. It is run once on one number."""
    function = getattr(torch.Tensor, op, None) or getattr(torch.nn.functional, op, None)
    if not op.endswith("_") or op.endswith("__") or function is None or has_hooks() or is_transformed():
        return None
    with (
        hushed(),
        without_dispatch_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng([]),
    ):
        written = torch.ones(1, requires_grad=True, dtype=torch.float32, device="cpu") * 1
        try:
            node = cast("Node", function(written).grad_fn)
        except (TypeError, RuntimeError, AttributeError):
            return None
        kept = ((slot, packed_object(saved)) for slot, saved in saved_slots(node)) if node is not None else ()
        return next(((node.name(), slot) for slot, one in kept if one is not None and one.is_set_to(written)), None)


def version_error(tensor: torch.Tensor, saved: int, maker: Any, number: int) -> str:
    """Return PyTorch's error for a version of ``tensor`` other than ``saved`` (saved_variable.cpp:167-197).

    ``maker`` is the Node that made it, ``number`` its output number where that Node saved it itself, else 0.
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


def function_class(node: Node) -> Any:
    """Return the custom Function of a Node; None for every other Node, and where the name is missing."""
    return getattr(type(node), "_forward_cls", None)


def are_read(packed: list[Any]) -> bool:
    """Whether the running backward reads one of the objects ``packed`` by pack hooks.

    Their Nodes are searched from the running one on; an object whose Node is not found counts as read.
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


def makes_view(node: Node) -> bool:
    """Whether a Node represents an operation that makes a view, by its name."""
    name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
    return name in _VIEWS


_VIEWS = frozenset(
    {
        *("Alias", "AsStrided", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
        *("SplitWithSizes", "Squeeze", "T", "Transpose", "Unbind", "Unfold", "Unsqueeze", "View"),
    }
)


def metadata_of(node: Node) -> dict[str, Any]:
    """Return the dict that PyTorch keeps with a Node for Python: a property, though torch's types say a method."""
    return cast("dict[str, Any]", node.metadata)


def anomaly_stack(node: Node) -> list[str]:
    """Return the stack at which a Node was made under anomaly mode, in the format of ``traceback.format_stack``.

    Missing: empty, and the place is read from the source.
    """
    try:
        lines = metadata_of(node).get("traceback_", ())
    except (AttributeError, RuntimeError):
        return []
    return [line for line in lines if isinstance(line, str)]
