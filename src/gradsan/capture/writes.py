"""Logging of operations: replaces, while gradsan is on, every Python name of torch that writes or makes Nodes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradsan.capture import _torch, writers
from gradsan.capture.patches import Patches


def install(core: Any, patches: Patches) -> None:
    """Put a logging wrapper around every writing method, function and directly called operator."""
    wrapped: dict[int, Any] = {}
    # All lists are made before the first replacement: they are read off the very names that are replaced.
    functions, operations = list(writers.functions()), list(writers.operations())
    for writer in list(writers.tensor_methods()):
        _replace(core, patches, wrapped, torch.Tensor, writer.op, getattr(torch.Tensor, writer.op), writer)
    for namespace, name, function, writer in functions:
        _replace(core, patches, wrapped, namespace, name, function, writer)
    for namespace, name, function in operations:
        _replace(core, patches, wrapped, namespace, name, function, None)
    owner, name, function = _torch.function_apply()
    patches.set(owner, name, classmethod(core.writer(function, name, "plain", -1, None)))
    _watch_operators(core, patches)


def _replace(
    core: Any,
    patches: Patches,
    wrapped: dict[int, Any],
    owner: Any,
    name: str,
    function: Any,
    writer: writers.Writer | None,
) -> None:
    wrapper = wrapped.get(id(function))
    if wrapper is None:
        wrapper = function
        if writer is None:
            wrapper = core.writer(function, name, "plain", -1, None)
        else:
            for position in writer.positions:
                wrapper = core.writer(wrapper, writer.op, writer.kind, position, None)
            if writer.keyword:
                wrapper = core.writer(wrapper, writer.op, "out", -1, writer.keyword)
        wrapped[id(function)] = wrapper
        undo = _torch.introduce_to_jit(function, wrapper)
        if undo is not None:
            patches.on_undo(undo)
    patches.set(owner, name, wrapper)


def _watch_operators(core: Any, patches: Patches) -> None:
    for owner, schema_of in (
        (_torch.operator_class(), lambda operator: operator._schema),
        (_torch.operator_packet_class(), lambda packet: getattr(packet, packet.overloads()[0])._schema),
    ):
        if owner is None:
            continue
        call = owner.__call__

        def watched(self: Any, /, *args: Any, __call: Any = call, __schema: Any = schema_of, **kwargs: Any) -> Any:
            result = __call(self, *args, **kwargs)
            if core.active:
                _log_operator(core, __schema(self), args, kwargs)
            return result

        patches.set(owner, "__call__", functools.wraps(call)(watched))


def _log_operator(core: Any, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not schema.is_mutable:
        return
    stack = None
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or not info.is_write:
            continue
        target = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in target if isinstance(target, (tuple, list)) else (target,):
            if torch.is_tensor(tensor):
                stack = stack or core.stack(2)
                core.log_write(tensor, schema.name.partition("::")[2], "op", None, stack)
