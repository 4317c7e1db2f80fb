"""Every private torch name that gradsan touches, feature-detected, each with what happens where it is missing.

Nothing outside this module may name something of torch that starts with an underscore, except ``Tensor._version``,
``Tensor._base`` and ``UntypedStorage._cdata``, which the hot path reads directly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, NamedTuple

import torch
import torch._VF
import torch.fft
import torch.jit._builtins as _jit_builtins
import torch.linalg
import torch.nn.functional
import torch.optim
import torch.sparse
import torch.special
import torch.utils.checkpoint as _checkpoint
from torch.autograd import graph as _graph
from torch.multiprocessing.reductions import StorageWeakRef

is_tensor = torch.is_tensor
is_grad_enabled = torch.is_grad_enabled
is_compiling = torch.compiler.is_compiling
is_traced_by_dynamo = torch.compiler.is_dynamo_compiling

# Missing: modes are not noticed, and see what gradsan reads.
has_function_modes: Callable[[], bool] = getattr(torch._C, "_is_torch_function_mode_enabled", lambda: False)
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes that have no ``__torch_function__`` of the program's."""


def hush() -> Any:
    """Let no ``__torch_function__``, of modes and of subclasses, be asked; gives what :func:`unhush` takes.

    Missing: None, and they see what gradsan reads.
    """
    state = getattr(torch._C, "_TorchFunctionState", None)
    if state is None or not hasattr(torch._C, "_set_torch_function_state"):
        return None
    before = torch._C._get_torch_function_state()  # type: ignore[attr-defined]
    torch._C._set_torch_function_state(state.ALL_DISABLED)
    return before


def unhush(before: Any) -> None:
    """End what :func:`hush` began."""
    if before is not None:
        torch._C._set_torch_function_state(before)  # type: ignore[attr-defined]


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """The same for a block."""
    before = hush()
    try:
        yield
    finally:
        unhush(before)


def _zero() -> int:
    return 0


def _none() -> None:
    return None


# The number the next autograd Node of this thread will carry. Missing: 0, and the order of nodes and writes is unknown.
sequence_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", _zero)

# The Node whose backward runs in this thread. Missing: None, and the operation that saved a tensor stays unnamed.
current_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", _none)

# The innermost default saved-tensor hooks of this thread as (pack, unpack). Missing: None, hooks cannot be inspected.
_top_hooks: Callable[[bool], Any] | None = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)

# Pushing and popping are what the public context manager ``saved_tensors_hooks`` does; it is the fallback.
push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

# Why hooks may not be used in this thread just now (functorch transforms set it). Missing: never known to be forbidden.
hooks_forbidden: Callable[[], str | None] = getattr(
    torch._C._autograd, "_saved_tensors_hooks_get_disabled_error_message", _none
)


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost (pack, unpack) pair of this thread, None where there is none or torch cannot tell."""
    if _top_hooks is None:
        return None
    pair = _top_hooks(True)
    return None if pair is None else (pair[0], pair[1])


@functools.lru_cache(maxsize=4096)
def _slot_names(kind: Any) -> tuple[str, ...]:
    """The names of the ``_raw_saved_*`` attributes of a class of Nodes; of a custom Function's there is one list."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_slots(node: Any) -> Iterator[tuple[str, Any]]:
    """(slot name, SavedTensor) of every saved tensor that a Node shows; list slots come as ``name[i]``.

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
        if isinstance(value, (tuple, list)):
            for position, item in enumerate(value):
                if item is not None:
                    yield f"{slot}[{position}]", item
        elif value is not None:
            yield slot, value


def packed_object(saved: Any) -> Any:
    """What the pack hook returned for a SavedTensor; None where there were no hooks or it is freed."""
    try:
        return saved.data
    except (RuntimeError, AttributeError):
        return None


def read_slot(node: Any, slot: str) -> Any:
    """What backward would get from a slot (``name`` of :func:`saved_slots`, a list as a whole), checked as there."""
    return getattr(node, slot if slot == "saved_tensors" else f"_saved_{slot}")


def is_hooked(saved: Any) -> bool:
    """Whether saved-tensor hooks stand behind a SavedTensor: reading it would run the program's code.

    Missing ``unpack_hook``: True, and nothing is read.
    """
    return getattr(saved, "unpack_hook", True) is not None


def hides_saves(node: Any) -> bool:
    """Whether a Node may have saved tensors that Python cannot see.

    CopySlices, and C++ Nodes without a class of their own: those of ``_foreach_`` operations and of extensions.
    """
    return is_copy_slices(node) or type(node).__name__ == "CppFunction"


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


def engine_inputs(error: BaseException, outputs: Any) -> tuple[Any, ...]:
    """The ``inputs`` of the engine call on ``outputs`` that ended with ``error``; empty where none were named.

    Read off the frame of the Python function through which torch enters the engine. Missing: empty, and all Nodes are
    thought to run.
    """
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "_engine_run_backward":
            names = frame.f_locals
            args = names.get("args", ())
            if names.get("t_outputs") is outputs and len(args) > 3:
                return tuple(args[3])
        trace = trace.tb_next
    return ()


def node_sequence(node: Any) -> int | None:
    """A Node's sequence number: creation order within a thread. None for AccumulateGrad, which has none."""
    number: int = node._sequence_nr()
    return None if number >= 2**63 else number


def weak_identity(tensor: Any) -> tuple[int, int | None, tuple[Any, ...]]:
    """(storage, version, geometry) for tensors without an ordinary storage or version (sparse, inference, nested)."""
    try:
        version = tensor._version
    except RuntimeError:
        version = None
    try:
        storage = tensor.untyped_storage()._cdata
        geometry: tuple[Any, ...] = (
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.element_size(),
        )
    except (RuntimeError, NotImplementedError):
        storage, geometry = storage_identity(tensor), (0, tuple(tensor.shape), None, 1)
    return storage, version, geometry


def storage_identity(tensor: Any) -> int:
    """A number that two tensors share while they share memory. Sparse tensors: that of their values."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        pass
    try:
        if tensor.layout is torch.sparse_coo:
            return int(tensor._values().untyped_storage()._cdata)
        return int(tensor.values().untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return int(tensor._cdata)


def storage_or_none(tensor: Any) -> int:
    """The identity of an ordinary storage, 0 where the tensor has none (sparse, nested)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


class weak_storage:  # noqa: N801
    """Whether a storage still lives, told without keeping its memory; its ``_cdata`` is not given away meanwhile.

    Missing: never known to have died.
    """

    __slots__ = ("_key",)

    def __init__(self, storage: Any) -> None:
        """Look at ``storage`` from now on."""
        self._key = storage._weak_ref() if hasattr(storage, "_weak_ref") else None

    def expired(self) -> bool:
        """Whether it has died."""
        return self._key is not None and bool(torch.UntypedStorage._expired(self._key))

    def __del__(self) -> None:
        """Let go of the number."""
        if self._key is not None:
            torch.UntypedStorage._free_weak_ref(self._key)


def optimizer_folder() -> str:
    """The folder of torch's own optimizers, whose inner writes are accounted for per step."""
    return str(Path(torch.optim.__file__).parent) + os.sep


def package_folder() -> str:
    """The folder torch is installed in."""
    return str(Path(torch.__file__).parent) + os.sep


_METHODS_IN_C = (MethodDescriptorType, WrapperDescriptorType)


def dress(wrapper: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Give ``wrapper`` the name, documentation and signature of ``original``.

    ``names_method`` tells whether ``__name__`` is that of a method in C, which may be looked up on an instance.
    """
    dressed = functools.wraps(original)(wrapper)
    dressed.names_method = getattr(original, "names_method", isinstance(original, _METHODS_IN_C))  # type: ignore[attr-defined]
    return dressed


def engine_entry_points() -> list[tuple[Any, str]]:
    """(namespace, name) of the one function through which ``backward`` and ``grad`` enter the engine."""
    return [
        (namespace, "_engine_run_backward")
        for namespace in (torch.autograd, _graph)
        if hasattr(namespace, "_engine_run_backward")
    ]


def all_schemas() -> list[Any]:
    """The schema of every operator known to the dispatcher."""
    return list(torch._C._jit_get_all_schemas())


def function_namespaces() -> list[Any]:
    """Every namespace of torch that holds builtin functions which may write to a tensor."""
    names = ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
    inner = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
    return [torch, torch._VF, *inner, torch.nn.functional, torch.linalg, torch.fft, torch.special, torch.sparse]


def variable_function(name: str) -> Any:
    """The builtin behind ``torch.<name>``, None where there is none."""
    return getattr(torch._C._VariableFunctions, name, None)


def operator_class() -> Any:
    """The class of ``torch.ops.<library>.<op>.<overload>``. Missing: operators called directly are a blind spot."""
    return getattr(getattr(torch, "_ops", None), "OpOverload", None)


def operator_packet_class() -> Any:
    """The class of ``torch.ops.<library>.<op>``; as for :func:`operator_class`."""
    return getattr(getattr(torch, "_ops", None), "OpOverloadPacket", None)


def function_apply() -> tuple[Any, str, Any]:
    """(owner, name, function taking the class first) of what makes the Node of every custom Function.

    A classmethod in Python up to 2.14; since 2.15 the C class's own, which takes the class as its first argument.
    """
    owner = torch.autograd.Function
    method = next(vars(kind)["apply"] for kind in owner.__mro__ if "apply" in vars(kind))
    return owner, "apply", getattr(method, "__func__", method)


def vf_module() -> Any:
    """The module object by which ``torch.nn.functional`` reaches builtin functions."""
    return torch._VF


def introduce_to_jit(pairs: Iterable[tuple[Any, Any]]) -> Callable[[], None]:
    """Make ``torch.jit.script`` take wrappers for the builtins they wrap; returns how to undo that.

    Missing table: nothing is done, and scripting a function that calls a wrapper says that the builtin is unknown.
    """
    table_of = getattr(_jit_builtins, "_get_builtin_table", None)
    if table_of is None:
        return lambda: None
    table = table_of()
    added = {id(wrapper): table[id(original)] for original, wrapper in pairs if id(original) in table}
    table.update(added)

    def undo() -> None:
        for key in added:
            table.pop(key, None)

    return undo


def output_info(node: Any, output: int) -> tuple[tuple[int, ...], str, str] | None:
    """(shape, dtype, device) of one of the tensors that a Node made. Missing: None, and only its name is shown."""
    try:
        found = node._input_metadata[output]
        return tuple(int(size) for size in found.shape), str(found.dtype).removeprefix("torch."), str(found.device)
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None


def has_backward_hooks(module: Any) -> bool:
    """Whether a module has full backward hooks, which pass its inputs and outputs through a custom Function.

    Missing: False, and a view made by a hook is told like one of any custom Function.
    """
    return bool(getattr(module, "_backward_hooks", None) or getattr(module, "_backward_pre_hooks", None))


def saved_number(node: Any, name: str) -> float | None:
    """A number that a Node keeps, such as ``negative_slope``. Missing: None, and the Node is not recognised by it."""
    found = getattr(node, f"_saved_{name}", None)
    return float(found) if isinstance(found, int | float) else None


_lazy_clone: Callable[[Any], Any] | None = getattr(torch, "_lazy_clone", None)
_is_cow: Callable[[Any], bool] = getattr(torch._C, "_is_cow_tensor", lambda _: False)


def can_be_cloned_lazily(tensor: Any) -> bool:
    """Whether a copy-on-write clone of a tensor is sound: CPU memory of torch's own, known to no other process.

    Memory that came from outside (``from_numpy``, ``frombuffer``, DLPack) cannot be resized. Missing: always copied.
    """
    if _lazy_clone is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    if type(tensor) is not torch.Tensor or tensor.is_inference():
        return False
    try:
        storage = tensor.untyped_storage()
        return bool(storage.resizable()) and not storage.is_shared()
    except (RuntimeError, NotImplementedError):
        return False


def lazy_clone(tensor: Any) -> Any:
    """A copy-on-write clone; an ordinary one where torch refuses."""
    assert _lazy_clone is not None
    try:
        return _lazy_clone(tensor)
    except RuntimeError:
        return tensor.clone()


def give_own_memory(holder: Any) -> None:
    """Let a tensor, or a storage, share its memory with no lazy clone any more.

    Torch cannot resize memory that is shared so: the next write fails within it (``c10/core/impl/COW.cpp``, 2.13).
    """
    with contextlib.suppress(RuntimeError, NotImplementedError):
        storage = holder.untyped_storage() if torch.is_tensor(holder) else holder
        # Asking a storage for its pointer is asking for memory to write to.
        storage.data_ptr()


def same_memory(one: Any, other: Any) -> bool:
    """Whether two tensors still share their memory copy-on-write. Missing ``const_data_ptr``: not known, False."""
    if not (_is_cow(one) and _is_cow(other)) or not hasattr(one, "const_data_ptr"):
        return False
    return bool(one.const_data_ptr() == other.const_data_ptr())


def memory_of(tensor: Any) -> tuple[int, int]:
    """(address, bytes) of the whole storage of a tensor, asked for without asking for memory to write to.

    Missing ``const_data_ptr``: memory shared copy-on-write is counted as if it were not.
    """
    storage = tensor.untyped_storage()
    pointer = tensor.const_data_ptr() if hasattr(tensor, "const_data_ptr") else int(storage._cdata)
    return int(pointer) - tensor.storage_offset() * tensor.element_size(), int(storage.nbytes())


def hooks_switch() -> Any:
    """The namespace whose ``_saved_tensors_hooks_disable`` and ``_enable`` forbid hooks, None where there is none."""
    switch = torch._C._autograd
    return switch if hasattr(switch, "_saved_tensors_hooks_disable") else None


def storage_reference(tensor: Any) -> Any:
    """Something that tells whether the storage of a tensor still lives, without keeping it; None where it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def is_gone(reference: Any) -> bool:
    """Whether the storage behind a :func:`storage_reference` has been freed."""
    return bool(reference.expired())


def slot_of(node: Any, packed: Any) -> str | None:
    """The slot of a Node whose pack hook returned ``packed``."""
    if node is None:
        return None
    return next((slot for slot, saved in saved_slots(node) if packed_object(saved) is packed), None)


def is_read_by_backward(node: Any, slot: str | None) -> bool:
    """Whether backward reads what stands in a slot.

    Batch norm saves its running statistics in training too, where its backward goes by the batch's own (the formula of
    native_batch_norm in derivatives.yaml); the kernel updates them right after the save.
    """
    if slot not in ("running_mean", "running_var"):
        return True
    return not any(getattr(node, name, False) is True for name in ("_saved_training", "_saved_train", "_saved_update"))


def is_filled_after_save(node: Any, slot: str | None) -> bool:
    """Whether the kernel fills a slot that was saved before it ran: the noise of rrelu, which nothing else writes."""
    return slot == "noise" and type(node).__name__.startswith("RreluWithNoise")


def version_error(tensor: Any, saved: int, node: Any, packed: Any) -> str:
    """What PyTorch says where the version of ``tensor`` is not the one ``saved`` (saved_variable.cpp:167-197)."""
    slot = slot_of(node, packed) or ""
    op = "" if node is None else node.name().removesuffix("0").removesuffix("Backward")
    output = f", which is output 0 of {op}," if op and slot.startswith("result") else ""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{output} is at version {tensor._version}; "
        f"expected version {saved} instead. Hint: enable anomaly detection to find the operation that failed to "
        "compute its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )


def checkpointed_functions(frame: Any) -> list[Any]:
    """What checkpoint runs again, or that closes over it, if ``frame`` is one of torch.utils.checkpoint.

    Missing: empty, and the report does not say which function was checkpointed.
    """
    if not frame.f_code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
        return []
    holders = [frame.f_locals.get("frame"), frame.f_locals.get("self")]
    reentrant = getattr(frame.f_locals.get("ctx"), "run_function", None) or frame.f_locals.get("run_function")
    found: list[Any] = [] if reentrant is None else [reentrant]
    for recompute in (getattr(holder, "recompute_fn", None) for holder in holders):
        for cell in getattr(recompute, "__closure__", None) or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if callable(content) and not isinstance(content, type):
                found.append(content)
    return found


def is_building_graph(error: BaseException) -> bool:
    """Whether an error arose while torch.compile traced a backward, so that no backward of the program has failed.

    Read off the files of the traceback. Missing: False.
    """
    trace = error.__traceback__
    while trace is not None:
        if _captures_graph(trace.tb_frame):
            return True
        trace = trace.tb_next
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _captures_graph(frame):
            return True
        frame = frame.f_back
    return False


def _captures_graph(frame: Any) -> bool:
    # Compiled functions run in files of the same folder.
    file: str = frame.f_code.co_filename
    return "_aot_autograd" in file and "graph_capture" in file


def traced_graph(error: BaseException) -> Any:
    """The program's own operations as torch.compile had traced them (an fx.GraphModule), where a compiler failed.

    Read off the frames of ``error`` and of what it was raised from. Missing: None, and the report names no line within
    the compiled function.
    """
    seen: set[int] = set()
    looked_at: BaseException | None = error
    while looked_at is not None and id(looked_at) not in seen:
        seen.add(id(looked_at))
        trace = looked_at.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            graph = frame.f_locals.get("gm") if "/_dynamo/" in frame.f_code.co_filename.replace("\\", "/") else None
            if isinstance(graph, torch.fx.GraphModule):
                return graph
            trace = trace.tb_next
        looked_at = looked_at.__cause__
    return None


def without_data(graph: Any) -> contextlib.AbstractContextManager[Any]:
    """The mode in which a traced graph was traced: tensors made in it have no data. Missing: a context of no effect."""
    for node in graph.graph.nodes:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            found: contextlib.AbstractContextManager[Any] = mode
            return found
    return contextlib.nullcontext()


def checked_operator(error: BaseException) -> Any:
    """The Python function behind the custom operator whose schema check failed.

    Read off the frames of the error and of what it was raised from. Missing: None, and no line of it is named.
    """
    known = getattr(getattr(torch._library, "custom_ops", None), "OPDEFS", {})
    found = None
    looked_at: BaseException | None = error
    while looked_at is not None:
        trace = looked_at.__traceback__
        while trace is not None:
            func = trace.tb_frame.f_locals.get("func")
            name = getattr(getattr(func, "_schema", None), "name", None)
            definition = known.get(name) if isinstance(name, str) else None
            found = getattr(definition, "_init_fn", found)
            trace = trace.tb_next
        looked_at = looked_at.__cause__
    return found


def wrapped_by_ddp(frames: Iterable[Any]) -> Any:
    """The module within the DistributedDataParallel that the frames know. Missing: None, no parameter has a name."""
    for frame in frames:
        for value in (frame.f_locals.get("self"), *frame.f_locals.values(), *frame.f_globals.values()):
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                return value.module
    return None


def function_class(node: Any) -> Any:
    """The custom Function whose Node this is; None for every other Node, and where the name is missing."""
    return getattr(type(node), "_forward_cls", None)


def reentrant_checkpoint() -> Any:
    """The custom Function behind ``checkpoint(use_reentrant=True)``. Missing: that form is not watched."""
    return getattr(_checkpoint, "CheckpointFunction", None)


def checkpoint_module() -> tuple[Any, str, Any] | None:
    """(owner, name, class of frames) of what stands behind ``checkpoint(use_reentrant=False)``.

    Missing: None, that form is not watched.
    """
    name = "_checkpoint_without_reentrant_generator"
    frames = getattr(_checkpoint, "_CheckpointFrame", None)
    needed = ("save_inputs", "get_inputs", "check_recomputed_tensors_match")
    if not hasattr(_checkpoint, name) or not all(hasattr(frames, one) for one in needed):
        return None
    return _checkpoint, name, frames


def cached_in_checkpoint(frames: Iterable[Any]) -> tuple[Any, str] | None:
    """The tensor that selective checkpointing kept and found changed, and the operator whose result it is.

    Read off the frames of the error. Missing: None, and the report does not say what was kept.
    """
    op = "?"
    for frame in frames:
        if not frame.f_code.co_filename.replace("\\", "/").endswith("torch/utils/checkpoint.py"):
            continue
        names = frame.f_locals
        packet = getattr(names.get("func"), "overloadpacket", None)
        op = getattr(packet, "__name__", op)
        kept = getattr(names.get("self"), "val", None)
        if torch.is_tensor(kept) and hasattr(names["self"], "version"):
            return kept, op
    return None


def determinism_checks() -> dict[str, Any]:
    """What checkpoint looks at of each saved tensor, by name of the check. Missing: empty, no value is compared."""
    found = getattr(_checkpoint, "_allowed_determinism_checks_to_fns", None)
    return found if isinstance(found, dict) else {}


def saved_in_checkpoint(frame: Any) -> list[tuple[Any, Any]]:
    """(what stands in the graph, what checkpoint looked at) of each tensor that a checkpoint's forward saved.

    Missing: empty, and no value is told to be another.
    """
    holders, looked_at = getattr(frame, "weak_holders", ()), getattr(frame, "x_metadatas", ())
    return [(holder(), found) for holder, found in zip(holders, looked_at, strict=False)]


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


def recomputed_call(frame: Any) -> tuple[Any, dict[str, Any]] | None:
    """The function that checkpoint runs again for one of its frames, and its keyword arguments.

    Read off the closure of ``recompute_fn``. Missing: None, and nothing is noted.
    """
    recompute: Any = getattr(frame, "recompute_fn", None)
    code = getattr(recompute, "__code__", None)
    if code is None:
        return None
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, recompute.__closure__ or (), strict=False):
        if name in ("fn", "kwargs"):
            found[name] = cell.cell_contents
    return (found["fn"], dict(found.get("kwargs") or {})) if "fn" in found else None


# The names of what ``module(…)`` runs, as they stand on a bound method of it.
MODULE_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")


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


def own_tensors(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers of a module itself, some of them None. Missing: read by its iterators."""
    parameters, buffers = getattr(module, "_parameters", None), getattr(module, "_buffers", None)
    if isinstance(parameters, dict) and isinstance(buffers, dict):
        return parameters, buffers
    return dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))


def has_forward_pre_hooks(module: Any) -> bool:
    """Whether something runs before a module's forward. Missing: False."""
    return bool(getattr(module, "_forward_pre_hooks", None))


@functools.lru_cache(maxsize=1)
def normalisation_classes() -> tuple[type, ...]:
    """The modules that keep running statistics. Missing: only the public ones by name."""
    base = getattr(torch.nn.modules.batchnorm, "_NormBase", None)
    return (base,) if base is not None else (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def wrapped_module(module: Any) -> Any:
    """The user's module inside one that only runs it otherwise (compiled, data parallel); None for any other.

    Missing ``_orig_mod``: a compiled module is taken for one without source.
    """
    inner = vars(module).get("_orig_mod")
    if inner is None and type(module).__name__ == "OptimizedModule":
        inner = dict(module.named_children()).get("_orig_mod")
    if inner is None and type(module).__name__ in ("DataParallel", "DistributedDataParallel"):
        inner = dict(module.named_children()).get("module")
    return inner


SHARDED_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def may_communicate(nodes: Iterable[Any]) -> bool:
    """Whether a backward through these Nodes may wait for other ranks, which would have to run it just as often.

    Collectives stand in custom Functions, in Nodes of c10d, and in the hooks of FSDP2.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return False
    is_sharded = sys.modules.get(SHARDED_MODULE) is not None
    return is_sharded or any(function_class(node) is not None or "c10d" in node.name() for node in nodes)


def buffer_sync() -> tuple[Any, str]:
    """(owner, name) of the method by which DistributedDataParallel gives its buffers to the other ranks.

    Missing: (None, ""), and such writes are not seen.
    """
    owner = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    return (owner, "_sync_buffers") if hasattr(owner, "_sync_buffers") else (None, "")


def sharded_group() -> Any:
    """The class of FSDP2 that gathers the parameters of a module, where the program has imported it.

    Missing: None, and what backward gathers anew is not compared with what forward had.
    """
    group = getattr(sys.modules.get(SHARDED_MODULE), "FSDPParamGroup", None)
    return group if all(hasattr(group, name) for name in ("wait_for_unshard", "pre_backward", "is_unsharded")) else None


def anomaly_stack(node: Any) -> list[str]:
    """The stack at which a Node was made, as ``traceback.format_stack`` writes it, where anomaly mode was on then.

    Missing: empty, and the place is read off the source.
    """
    try:
        lines = node.metadata.get("traceback_", ())
    except (AttributeError, RuntimeError):
        return []
    return [line for line in lines if isinstance(line, str)]


class EngineCall(NamedTuple):
    """A call into the engine that ended with an exception, read off its traceback; ``trace`` is the engine's own part.

    ``outputs`` and ``inputs`` as given, ``accumulates`` tells ``backward`` from ``grad``.
    """

    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    accumulates: bool
    retain_graph: bool
    trace: Any


def frames_of(error: BaseException) -> Iterator[Any]:
    """The frames that an exception came through, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def enters_engine(frame: Any) -> bool:
    """Whether this is the frame of the Python function through which torch enters the engine. Missing: False."""
    return frame.f_code.co_name == "_engine_run_backward" and "t_outputs" in frame.f_locals


def engine_call(error: BaseException) -> EngineCall | None:
    """The innermost engine call that ``error`` came through; None where it came through none.

    Read off the frame of the Python function through which torch enters the engine. Missing: None, and an error that
    nobody watched is not explained.
    """
    found = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if enters_engine(frame):
            names = frame.f_locals
            args, keywords = tuple(names.get("args", ())), names.get("kwargs", {})
            inputs = tuple(args[3]) if len(args) > 3 else ()
            retain = bool(args[1]) if len(args) > 1 else False
            found = EngineCall(tuple(names["t_outputs"]), inputs, keywords.get("accumulate_grad", True), retain, trace)
        trace = trace.tb_next
    return found


def name_in_module(name: str) -> str:
    """A dotted name within a module as programs say it: the wrapper of torch.compile hands on what it holds.

    ``l.weight`` of ``_orig_mod.l.weight``. Missing ``_orig_mod``: names are what they are.
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def script_compilers() -> list[tuple[Any, str]]:
    """(namespace, name) of what compiles the source of a function or of a module's methods for ``torch.jit.script``.

    Missing: scripts that call Python functions of torch which gradsan wraps cannot be compiled while it is on.
    """
    methods = getattr(torch.jit, "_recursive", None)
    found = [(torch._C, "_jit_script_compile"), (methods, "create_methods_and_properties_from_stubs")]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def with_lookup(argument: Any, change: Callable[[Callable[[str], Any]], Callable[[str], Any]]) -> Any:
    """An argument of such a compiler with every callback in it by which names are looked up changed by ``change``."""
    if isinstance(argument, FunctionType):
        return change(argument)
    if isinstance(argument, (list, tuple)) and not hasattr(argument, "_replace"):
        return [with_lookup(one, change) for one in argument]
    if hasattr(argument, "resolution_callback"):
        return argument._replace(resolution_callback=change(argument.resolution_callback))
    return argument


def is_module_call(file: str) -> bool:
    """Whether a frame of this file is ``nn.Module`` calling ``forward``."""
    return file == torch.nn.modules.module.__file__


def is_function_call(file: str) -> bool:
    """Whether a frame of this file is ``autograd.Function`` applying a Function."""
    return file == torch.autograd.function.__file__


def use_count(tensor: Any) -> int | None:
    """How many hold a tensor, beside Python, which counts once. Missing: None."""
    count = getattr(tensor, "_use_count", None)
    return None if count is None else int(count())


def is_engine_frame(frame: Any) -> bool:
    """Whether a frame is torch's call into the engine: what it has called runs inside a backward."""
    code = frame.f_code
    return bool(code.co_name == "_engine_run_backward" and code.co_filename == _graph.__file__)


def gradients_given(frame: Any) -> tuple[Any, ...]:
    """The gradients that a backward began with; ``frame`` as of :func:`is_engine_frame`. Missing: none are known."""
    args = frame.f_locals.get("args", ())
    return tuple(args[0] or ()) if args and isinstance(args[0], tuple) else ()


def is_hook_frame(frame: Any) -> bool:
    """Whether a frame is torch's own between the engine and a hook of a module, or the backward of a Function."""
    return frame.f_code.co_filename in (torch.utils.hooks.__file__, torch.autograd.function.__file__)
