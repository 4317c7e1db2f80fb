"""Allowances of the reference run: operations that PyTorch rejects, carried out anyway.

Each allowance does what the program says and gives autograd the missing information; the faults of the program
decide which of them a run has (:mod:`gradsan.repair.search`). They are for the reference run alone.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from gradsan import _torch
from gradsan._watching import watching_of
from gradsan.graph.walk import learns_elsewhere
from gradsan.originals.deep import Deep
from gradsan.originals.originals import Kept
from gradsan.overlap import is_folded
from gradsan.record.recorder import recorder
from gradsan.record.stacks import is_own_file
from gradsan.repair.trials.own_results import OwnResults, apart, carried_out

_SPLITTING = frozenset({"unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes"})
_CARRIED = frozenset(
    {
        "write_leaves",
        "renew_leaves",
        "record_out",
        "single_views",
        "record_views",
        "own_memory",
        "own_leaf_views",
        "own_results",
        "own_sources",
        "read_values",
        "read_other_values",
        *("cut_results", "graph_copies", "own_views", "plain_copies", "plain_integers"),
    }
)
_REFUSED_LEAF = ("a leaf Variable that requires grad", "a view of a leaf Variable")
_REFUSED_OUT = "don't support automatic diff"
_REFUSED_SOURCE = "some elements of the input tensor and the written-to tensor refer to a single memory location"
_REFUSED_READING = "Can't call numpy() on Tensor that requires grad"


def allow(names: Iterable[str]) -> None:
    """Install the allowances named by ``names`` in this process.

    ``keep_graphs``: a backward frees nothing. ``write_leaves``: a write to a leaf is not recorded. ``renew_leaves``: as
    before, but ``x += y`` returns a new, recorded tensor. ``renew_results``: so does ``s = x.exp_()``. ``record_out``:
    an ``out=`` result is recorded, unless it is a leaf. ``single_views``: the views of one call are made one by one.
    ``record_views``: views made under ``no_grad`` are recorded. ``own_memory``: expanded tensors and windows
    that overlap have memory of their own. ``own_leaf_views``: so do recorded views of leaves.
    ``run_eagerly``: nothing is compiled.
    ``own_gradients``: hooks of tensors and the backward of Functions get copies of gradients. ``own_context``:
    Functions keep copies on ``ctx``.
    ``without_checkpoint``: checkpointed functions are run once, and their saved tensors are kept.
    ``no_inference``: inference mode is ``no_grad``.
    ``own_results``: views that Functions return have memory of their own; reading what they viewed after a write ends
    the run. ``own_views``: so have all recorded views. ``graph_copies``, ``plain_copies``: a deep copy of a result has
    its graph, or none. ``cut_results``: a result that is to require no gradient is detached. ``plain_integers``:
    integers get no flag.
    ``own_sources``: what a write reads of the memory that it writes is a copy from before.
    ``release_gradients``: ``zero_grad`` fills copies with zeros, so that a graph on the gradients stays.
    ``gathered_values``: values gathered by ``fully_shard`` are kept as the forward had them, as copies.
    ``read_values``: ``numpy()`` of a tensor that requires grad gives a copy; ``read_other_values``: one of other
    values. ``padded_gradients``: a Function's backward may leave out the inputs that need no gradient.
    ``own_rank``: DistributedDataParallel exchanges no gradients; those of a single rank are correct without.
    """
    wanted = frozenset(names)
    if "keep_graphs" in wanted:
        torch.autograd.backward = _keeping(torch.autograd.backward, 2)
        torch.autograd.grad = _keeping(torch.autograd.grad, 3)
    if "no_inference" in wanted:
        torch.inference_mode = torch.autograd.inference_mode = _no_grad_for_inference  # type: ignore[assignment,misc]
    if "run_eagerly" in wanted:
        torch.compiler.set_stance("force_eager")
    if "own_gradients" in wanted:
        torch.Tensor.register_hook = _with_own_gradient(torch.Tensor.register_hook)  # type: ignore[method-assign]
        _look_at_applied(lambda node: node.register_prehook(_copies))
    if "own_context" in wanted:
        _look_at_applied(_own_context)
    if "without_checkpoint" in wanted:
        torch.utils.checkpoint.checkpoint = _run_once
    elif wanted & _CARRIED:
        # No mode of functions is active in what a backward runs again.
        torch.utils.checkpoint.checkpoint = _run_once_alike(torch.utils.checkpoint.checkpoint)
    if "release_gradients" in wanted:
        torch.nn.Module.zero_grad = _releasing(  # type: ignore[method-assign]
            torch.nn.Module.zero_grad, lambda module: module.parameters()
        )
        torch.optim.Optimizer.zero_grad = _releasing(  # type: ignore[method-assign]
            torch.optim.Optimizer.zero_grad,
            lambda optimizer: (one for group in optimizer.param_groups for one in group["params"]),
        )
    if "gathered_values" in wanted:
        deep = watching_of(recorder()).deep
        deep.keep_original = _with_gathered(deep)  # type: ignore[method-assign,assignment]
    if "padded_gradients" in wanted:
        BackwardCFunction.apply = _padded(BackwardCFunction.apply)  # type: ignore[method-assign]
    if "own_rank" in wanted:
        parallel = torch.nn.parallel.DistributedDataParallel
        parallel.__init__ = _by_itself(parallel.__init__)  # type: ignore[method-assign]
    if wanted & _CARRIED:
        _Carrying(wanted).__enter__()  # type: ignore[no-untyped-call]


def _keeping(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """``original`` with ``retain_graph``, its argument at ``position``, always true."""

    @functools.wraps(original)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], True, *args[position + 1 :])
        else:
            kwargs["retain_graph"] = True
        return original(*args, **kwargs)

    return keeping


def _releasing(zero: Callable[..., None], parameters: Callable[[Any], Iterable[Any]]) -> Callable[..., None]:
    """``zero_grad`` that replaces a gradient with a graph by a copy first."""

    @functools.wraps(zero)
    def releasing(owner: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in parameters(owner):
            if parameter.grad is not None and parameter.grad.requires_grad:
                parameter.grad = parameter.grad.detach().clone()
        zero(owner, *args, **kwargs)

    return releasing


def _no_grad_for_inference(mode: Any = True) -> Any:
    """``torch.inference_mode``, called with a flag, or used as a decorator without a call."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def _run_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``checkpoint`` that calls ``function`` once and discards nothing."""
    own = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
    return function(*args, **{name: one for name, one in kwargs.items() if name not in own})


def _run_once_alike(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """``_run_once``, except where a reentrant ``checkpoint`` cuts the graph: no argument needs a gradient."""

    @functools.wraps(checkpoint)
    def alike(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_cut = kwargs.get("use_reentrant", True) and not any(
            torch.is_tensor(one) and one.requires_grad for one in args
        )
        return (checkpoint if is_cut else _run_once)(function, *args, **kwargs)

    return alike


def _with_gathered(deep: Deep) -> Callable[[Any, int, Any], Kept]:
    """``keep_original`` that also copies whole parameters, which healing leaves to ``fully_shard`` for their size."""
    keep = deep.keep_original

    def keep_original(tensor: torch.Tensor, clock: int, stack: Any) -> Kept:
        kept = keep(tensor, clock, stack)
        storage = _torch.storage_or_none(tensor)
        if storage and deep.left_alone.holds(storage):
            kept.original, kept.is_copied = kept.alias.clone(), True
        return kept

    return keep_original


def _by_itself(initialise: Callable[..., None]) -> Callable[..., None]:
    """``DistributedDataParallel.__init__`` with the permanent effect of ``no_sync()``."""

    @functools.wraps(initialise)
    def by_itself(module: Any, *args: Any, **kwargs: Any) -> None:
        initialise(module, *args, **kwargs)
        module.require_backward_grad_sync = False

    return by_itself


def _with_own_gradient(register: Callable[..., Any]) -> Callable[..., Any]:
    """``register_hook`` whose hooks change a copy, which replaces the gradient."""

    @functools.wraps(register)
    def with_own_gradient(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> Any:
        def own(gradient: Any) -> Any:
            copy = gradient.clone()
            result = hook(copy)
            return copy if result is None else result

        return register(tensor, own)

    return with_own_gradient


def _padded(apply: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of Functions, whose results get a None for each input that needs no gradient.

    The first use in which as many inputs need a gradient as it returns shows whose they are. Without one, they
    belong to the first inputs, if each of these needs one.
    """
    known: dict[tuple[type, int], tuple[int, ...]] = {}

    @functools.wraps(apply)
    def padded(node: Any, *gradients: Any) -> Any:
        result = apply(node, *gradients)
        given = result if isinstance(result, tuple) else (result,)
        needed = node.needs_input_grad
        if len(given) >= len(needed):
            return result
        wanted = tuple(position for position, one in enumerate(needed) if one)
        if len(wanted) == len(given) and not any(one is None for one in given):
            known.setdefault((type(node), len(given)), wanted)
        places = known.get((type(node), len(given)))
        if places is None and any(not needed[at] for at, one in enumerate(given) if one is not None):
            return result
        passed = dict(zip(places or range(len(given)), given, strict=True))
        if any(passed.get(position) is None for position in wanted):
            return result
        return tuple(passed.get(position) for position in range(len(needed)))

    return padded


def _copies(gradients: Any) -> tuple[Any, ...]:
    return tuple(one.clone() if torch.is_tensor(one) else one for one in gradients)


def _own_context(node: Node) -> None:
    for name, kept in list(vars(node).items()):
        setattr(node, name, _with_copies(kept))


def _with_copies(kept: Any) -> Any:
    """``kept`` with copies of its tensors, also within plain containers."""
    if type(kept) in (list, tuple):
        return type(kept)(map(_with_copies, kept))
    if type(kept) is dict:
        return {key: _with_copies(one) for key, one in kept.items()}
    return kept.clone() if torch.is_tensor(kept) else kept


def _look_at_applied(look: Callable[[Any], object]) -> None:
    """Call ``look`` with the Node of every custom Function that is applied; the Node is its ``ctx``."""
    standing = inspect.getattr_static(torch.autograd.Function, "apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = standing.__get__(None, cls)(*args, **kwargs)
        results = result if isinstance(result, list | tuple) else (result,)
        nodes = (one.grad_fn for one in results if torch.is_tensor(one))
        for node in dict.fromkeys(node for node in nodes if node is not None):
            if hasattr(node, "register_prehook") and hasattr(node, "__dict__"):
                look(node)
        return result

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]


class _Carrying(TorchFunctionMode):
    def __init__(self, wanted: frozenset[str]) -> None:
        super().__init__()
        self._wanted = wanted
        self._own_results = OwnResults() if wanted & {"own_results", "own_views"} else None
        if self._own_results is not None and "own_results" in wanted:
            self._own_results.install()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._own_results is not None:
            self._own_results.check((args, named))
        try:
            result = func(*args, **named)
        except RuntimeError as failure:
            if (carry := carried_out(failure, self._wanted, args)) is not None:
                return carry()
            if _REFUSED_READING in str(failure) and self._wanted & {"read_values", "read_other_values"}:
                return func(self._read(args[0]), *args[1:], **named)
            if _REFUSED_SOURCE in str(failure) and "own_sources" in self._wanted:
                written = named.get("out", args[0])
                return func(
                    *(apart(one, written) for one in args), **{key: apart(one, written) for key, one in named.items()}
                )
            if not self._may_write(failure) or self._loses_graph(failure, args):
                raise
            return self._written(func, args, named)
        if "single_views" in self._wanted and name in _SPLITTING:
            return _one_by_one(result)
        if "own_memory" in self._wanted:
            is_several = type(result) in (list, tuple)
            result = type(result)(map(_in_own_memory, result)) if is_several else _in_own_memory(result)
        if self._own_results is not None and "own_views" in self._wanted:
            return self._own_results.copies(result)
        if "own_leaf_views" in self._wanted and _is_recorded_view_of_leaf(result):
            return result.clone()
        if "record_views" in self._wanted and torch.is_tensor(result) and _is_unrecorded_view(result, args):
            with torch.enable_grad():
                return func(*args, **named)
        return result

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        if "read_values" in self._wanted:
            return copy
        # Neither moved nor mirrored: a spread or a distance would be the same.
        scale = torch.linspace(0.5, 1.5, copy.numel(), dtype=torch.float64, device=copy.device)
        return ((1 - copy) * scale.view(copy.shape)).to(copy.dtype)

    def _may_write(self, failure: RuntimeError) -> bool:
        if _REFUSED_OUT in str(failure):
            return bool(self._wanted & {"write_leaves", "renew_leaves", "record_out"})
        wanted = self._wanted & {"write_leaves", "renew_leaves"}
        return bool(wanted) and any(words in str(failure) for words in _REFUSED_LEAF)

    def _loses_graph(self, failure: RuntimeError, args: Any) -> bool:
        """Whether an unrecorded write to the leaf would cut the graph of an argument that a network computed."""
        if _REFUSED_OUT in str(failure) or self._renews():
            return False
        return any(torch.is_tensor(one) and learns_elsewhere(one, args[0]) for one in args[1:])

    def _renews(self) -> bool:
        if "renew_leaves" not in self._wanted:
            return False
        return _is_augmented_assignment() or ("renew_results" in self._wanted and _takes_result())

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._renews():
            return func(args[0].clone(), *args[1:], **kwargs)
        if "record_out" in self._wanted and not _is_trained(kwargs.get("out")):
            return _recorded_in(func, args, kwargs)
        with torch.no_grad():
            return func(*args, **kwargs)


def _is_recorded_view_of_leaf(result: Any) -> bool:
    base = result._base if torch.is_tensor(result) and result.grad_fn is not None else None
    return base is not None and base.is_leaf and base.requires_grad


def _is_trained(out: Any) -> bool:
    parts = out if isinstance(out, list | tuple) else (out,)
    return any(not torch.is_tensor(one) or (one.is_leaf and one.requires_grad) for one in parts)


def _recorded_in(func: Any, args: Any, kwargs: Any) -> Any:
    """The call without ``out=``, its result copied into the tensor passed for that."""
    given = kwargs["out"]
    results = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    pairs = zip(given, results, strict=True) if isinstance(given, list | tuple) else [(given, results)]
    for one, result in pairs:
        if one.grad_fn is not None and not one._is_view():
            # All of it is overwritten: no value of an earlier round remains.
            one.detach_()
        if one.shape != result.shape:
            one.resize_(result.shape)
        one.copy_(result)
    return given


def _is_augmented_assignment() -> bool:
    """Whether the program is at ``x += y``, which binds ``x`` to the returned object."""
    found = next(iter(_instructions()), None)
    # BINARY_OP has the operators in place among its arguments; before Python 3.11 each had an opcode.
    return found is not None and (
        found.opname.startswith("INPLACE_") or (found.opname == "BINARY_OP" and found.argrepr.endswith("="))
    )


def _takes_result() -> bool:
    """Whether the program uses the result of the call that it is executing."""
    following = _instructions()[1:2]
    return bool(following) and following[0].opname != "POP_TOP"


def _instructions() -> list[dis.Instruction]:
    """The current instruction of the program's own code, and those after it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return [one for one in dis.get_instructions(frame.f_code) if one.offset >= frame.f_lasti and one.opname != "CACHE"]


def _one_by_one(views: Any) -> Any:
    """The views of one call as views made by separate calls, of the same memory."""
    return type(views)(
        one if one._base is None else one._base.as_strided(one.shape, one.stride(), one.storage_offset())
        for one in views
    )


def _in_own_memory(result: Any) -> Any:
    """A copy of a view whose elements share memory, as of ``expand`` and ``unfold``; any other result itself."""
    if not torch.is_tensor(result) or result._base is None or result.layout is not torch.strided:
        return result
    return result.clone() if is_folded(sorted(zip(result.stride(), result.shape, strict=True))) else result


def _is_unrecorded_view(result: Any, args: Any) -> bool:
    return (
        not torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and result._base is not None
        and any(torch.is_tensor(one) and one is not result for one in args)
    )
