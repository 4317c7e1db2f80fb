"""Saved-tensor hooks and gradient hooks of the program: wrapping the former, finding the latter."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import graph
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.record._writer_pure import is_relay
from gradsan.record.detector import Run
from gradsan.record.log import Core, RawStack
from gradsan.record.patches import Patches, standing

_HOOKED = "BackwardHookFunctionBackward"


class HookedSave:
    """A save packed by the program's own hooks: the packed object, and the tensors in it that alias the original.

    ``copies`` are the other tensors in the packed object, where none aliases, with their versions.
    ``memory`` and ``kept`` are set by :class:`gradsan.detect.hooked.HookedValues`. ``forward`` is the
    save of a forward under ``checkpoint`` whose recomputed value this is, else None.
    """

    __slots__ = ("aliases", "clock", "copies", "forward", "kept", "memory", "packed", "stack", "unpack")

    def __init__(
        self,
        packed: Any,
        unpack: Callable[[Any], Any],
        aliases: tuple[tuple[Any, int], ...],
        clock: int,
        stack: RawStack,
    ):
        """``aliases`` are (tensor, version at save) of every tensor in ``packed`` that shares the original's memory."""
        self.packed = packed
        self.unpack = unpack
        self.aliases = aliases
        self.clock = clock
        self.stack = stack
        self.copies: tuple[tuple[Any, int], ...] = ()
        self.memory: Any = None
        self.kept: Any = None
        self.forward: HookedSave | None = None

    @property
    def in_slot(self) -> HookedSave:
        """The object that the slot of a Node has."""
        return self if self.forward is None else self.forward


class Recomputed(NamedTuple):
    """A value that a recomputation keeps for backward, as it was when an operation saved it; ``kept`` in deep mode."""

    weak: Any
    clock: int
    version: int
    kept: Any


class RecomputedSaves:
    """The saved tensors of running recomputations: the function may write to one after it was saved.

    Nothing is kept alive.
    """

    def __init__(self, run: Run) -> None:
        self._known: dict[int, Recomputed] = {}

    def add(self, save: HookedSave, tensor: torch.Tensor) -> None:
        """Note a value and its save."""
        number, known = id(tensor), self._known

        def forget(gone: Any) -> None:
            if number in known and known[number].weak is gone:
                del known[number]

        weak = _torch.weak_tensor(tensor, forget)
        known[number] = Recomputed(weak, save.clock, tensor._version, save.kept)

    def of(self, tensor: Any) -> Recomputed | None:
        """Return what is known of a value; None where it is of no recomputation."""
        known = self._known.get(id(tensor))
        return known if known is not None and known.weak() is tensor else None

    def is_overwritten(self, tensor: torch.Tensor) -> bool:
        """Whether the recomputation has written to a value since it was saved."""
        known = self.of(tensor)
        return known is not None and known.version != tensor._version


class Watcher(Protocol):
    """Observer of saves under the program's hooks: see :class:`gradsan.detect.hooked.HookedValues`."""

    @property
    def is_measuring(self) -> bool:
        """Whether the program's hooks must not be called now."""

    def must_look(self, save: HookedSave) -> bool:
        """Whether to call :meth:`look`."""

    def must_judge(self, save: HookedSave) -> bool:
        """Whether to call :meth:`judge` for a value whose version has not moved."""

    def look(self, save: HookedSave, tensor: torch.Tensor) -> None:
        """Note a packed tensor."""

    def aside(self, save: HookedSave) -> Any:
        """Return the value used instead of calling the program's unpack hook."""

    def judge(self, save: HookedSave, stale: Any, result: Any) -> Any:
        """Check an unpacked value; return the one that backward gets."""

    def judge_copy(self, save: HookedSave, copy: Any, result: Any) -> None:
        """Check an unpacked value of which the hooks had kept ``copy``, whose version has moved since."""

    def handed(self, result: Any) -> Any:
        """Return the same value in the form in which the running Node may get it."""

    def note_recomputed(self, save: HookedSave, tensor: torch.Tensor) -> None:
        """Note a value that a recomputation of ``checkpoint`` keeps for the forward's Nodes, and its save."""

    def judge_recomputed(self, save: HookedSave, result: Any) -> Any:
        """Check what a recomputation gives for the forward's ``save``; return the value that backward gets."""


Guard = Callable[[Callable[[], object]], None]


def watch_user_hooks(core: Core, patches: Patches, watcher: Watcher, guard: Guard) -> None:
    """Check the values that the program's hooks keep, whenever it enters ``saved_tensors_hooks`` from now on."""
    hooks_class = graph.saved_tensors_hooks

    def entering(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
        hooks = args[0]
        pack, unpack = hooks.pack_hook, hooks.unpack_hook
        # Where a hook cannot be called, or hooks are forbidden, torch itself raises.
        is_refused = not callable(pack) or not callable(unpack) or _torch.hooks_forbidden() is not None
        if is_refused or is_relay(pack):
            return None
        hooks.pack_hook, hooks.unpack_hook = _compose(core, pack, unpack, watcher, guard)
        return pack, unpack

    def entered(noted: Any, args: tuple[Any, ...], _: dict[str, Any], __: Any) -> None:
        args[0].pack_hook, args[0].unpack_hook = noted

    patches.set(hooks_class, "__enter__", core.listener(hooks_class.__enter__, entering, entered))
    _show_the_programs(patches, "data", lambda held: held.packed if isinstance(held, HookedSave) else held)
    _show_the_programs(patches, "unpack_hook", lambda hook: hook._gradsan_original if is_relay(hook) else hook)


def _show_the_programs(patches: Patches, name: str, shown: Callable[[Any], Any]) -> None:
    """Make an attribute of ``_raw_saved_*`` show the program's own object instead of gradsan's wrapper."""
    kind = _torch.SAVED_TENSOR
    read = None if kind is None else vars(kind).get(name)
    if read is not None:
        patches.set(kind, name, property(lambda saved: shown(read.__get__(saved))))


def _compose(
    core: Core, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], watcher: Watcher, guard: Guard
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    # What a recomputation of checkpoint reads is compared in checkpoints.py.
    computes_again = _torch.is_of_checkpoint(pack)

    def packed_by(_: Any, tensor: torch.Tensor, packed: Any) -> HookedSave:
        clock = core.tick()
        core.saves += 1
        storage = _torch.storage_identity(tensor)
        kept = list(_torch.tensors_in(packed, in_objects=True))
        aliases = tuple((one, one._version) for one in kept if _torch.storage_identity(one) == storage)
        save = HookedSave(packed, unpack, aliases, clock, core.stack(1))
        if not aliases and not computes_again:
            save.copies = tuple((one, one._version) for one in kept if not one.is_inference())
        is_recomputed = computes_again and any(one is packed for one, _ in aliases)
        if (is_recomputed or not computes_again) and watcher.must_look(save):
            guard(lambda: watcher.look(save, tensor))
        if is_recomputed:
            watcher.note_recomputed(save, packed)
        return save

    def unpacks(save: Any) -> Any:
        if not isinstance(save, HookedSave):
            return None
        if watcher.is_measuring:
            return (watcher.aside(save),)
        stale = next((alias for alias, version in save.aliases if alias._version != version), None)
        copy = next((copy for copy, version in save.copies if copy._version != version), None)
        return save.packed, (save, stale, copy)

    def unpacked(noted: Any, _: Any, result: Any) -> Any:
        save, stale, copy = noted
        if copy is not None:
            guard(lambda: watcher.judge_copy(save, copy, result))
        given = [result]
        # A hook that checks for itself and raises has hidden nothing.
        if computes_again:
            guard(lambda: given.append(watcher.judge_recomputed(save, result)))
        elif stale is not None or watcher.must_judge(save):
            guard(lambda: given.append(watcher.judge(save, stale, result)))
        return watcher.handed(given[-1])

    return core.relay(pack, None, packed_by), _torch.shown_when_read(core.relay(unpack, unpacks, unpacked))


_KEY = "gradsan.hooks"


def has_tensor_hooks(node: Node) -> bool:
    """Whether a hook was registered on an output of a Node; it may have been removed since."""
    return _KEY in _torch.metadata_of(node)


def note_tensor_hook(tensor: torch.Tensor) -> bool:
    """Note at its Node that a tensor has got a hook; return whether it has one."""
    node = tensor.grad_fn
    if node is not None:
        _torch.metadata_of(node).setdefault(_KEY, {})[tensor.output_nr] = weakref.ref(tensor._backward_hooks)
    return node is not None


def may_look(node: Node) -> bool:
    """Whether code of the program's reads gradients on their way: a hook, or the backward of a Function."""
    return node.name() == _HOOKED or has_tensor_hooks(node) or _torch.is_custom_node(node)


class TensorHooks:
    """Gradient hooks of tensors that were registered while gradsan was on.

    They are kept at each Node (numbers of Nodes restart in every thread), as weak references: Python's garbage
    collection does not see objects that a Node holds beside its graph.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._any = False

    def install(self, patches: Patches) -> None:
        """Watch ``register_hook`` until ``patches`` is undone."""
        register = standing(torch.Tensor, "register_hook")

        def registered(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            if not _torch.is_compiling():
                with contextlib.suppress(RuntimeError), _torch.hushed():
                    self._remember(args[0])

        patches.set(torch.Tensor, "register_hook", self._core.listener(register, None, registered))

    def at(self, node: Node) -> list[tuple[int, list[Any]]]:
        """Return the outputs of a Node that have hooks, each with its hooks in order."""
        known = _torch.metadata_of(node).get(_KEY) if self._any else None
        found = [(output, reference()) for output, reference in known.items()] if known else []
        return [(output, list(hooks.values())) for output, hooks in found if hooks]

    def _remember(self, tensor: torch.Tensor) -> None:
        self._any |= note_tensor_hook(tensor)
