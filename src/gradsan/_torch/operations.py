"""Operators, builtins and custom Functions that a program can call, and the sources of scripts."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
import torch._VF
import torch.fft
import torch.functional
import torch.jit._builtins as _jit_builtins
import torch.linalg
import torch.nn.functional
import torch.optim
import torch.sparse
import torch.special


def parameters_of(*optimizers: Any) -> list[torch.Tensor]:
    """Return all parameters in the groups of the optimizers, in order."""
    return [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]


def own_group(optimizer: Any, parameter: torch.Tensor) -> dict[str, int]:
    """The number of the ``group`` of a parameter if it has options of its own, such as another learning rate."""
    for number, group in enumerate(optimizer.param_groups):
        if any(one is parameter for one in group["params"]):
            # A scheduler keeps what it changes.
            options = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            defaults = getattr(optimizer, "defaults", {})
            return {"group": number} if any(options.get(key) != value for key, value in defaults.items()) else {}
    return {}


def has_step_hooks(optimizer: Any) -> bool:
    """Whether something is called before each step of an optimizer. Missing: False."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


@functools.cache
def optimizer_folder() -> str:
    """Return the folder of torch's own optimizers, whose inner writes are accounted for per step."""
    return str(Path(torch.optim.__file__).parent) + os.sep


@functools.cache
def package_folder() -> str:
    """Return the folder torch is installed in."""
    return str(Path(torch.__file__).parent) + os.sep


_METHODS_IN_C = (MethodDescriptorType, WrapperDescriptorType)


def marks_of(original: Any) -> dict[str, Any]:
    """Return the attributes by which a wrapper refers to its original: itself, and its name if it is a method in C."""
    is_method = isinstance(getattr(original, "_gradsan_original", original), _METHODS_IN_C)
    method = original.__name__ if is_method else None
    return {"_gradsan_original": original, "_gradsan_method": method}


def dress(wrapper: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Give ``wrapper`` the name, documentation and signature of ``original``, and the marks of a wrapper."""
    dressed = functools.wraps(original)(wrapper)
    vars(dressed).update(marks_of(original))
    return dressed


def all_schemas() -> list[Any]:
    """Return the schema of every operator known to the dispatcher."""
    return list(torch._C._jit_get_all_schemas())


def function_namespaces() -> list[Any]:
    """Return every namespace of torch with builtin functions that may write to a tensor."""
    names = ("_nn", "_linalg", "_fft", "_special", "_sparse", "_nested")
    inner = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
    return [
        torch,
        torch._VF,
        *inner,
        torch.functional,
        torch.nn.functional,
        torch.linalg,
        torch.fft,
        torch.special,
        torch.sparse,
    ]


def variable_function(name: str) -> Any:
    """Return the builtin behind ``torch.<name>``, or None."""
    return getattr(torch._C._VariableFunctions, name, None)


def operator_class() -> Any:
    """Return the class of ``torch.ops.<library>.<op>.<overload>``. Missing: direct operator calls are a blind spot."""
    return getattr(getattr(torch, "_ops", None), "OpOverload", None)


def operator_packet_class() -> Any:
    """Return the class of ``torch.ops.<library>.<op>``; as for :func:`operator_class`."""
    return getattr(getattr(torch, "_ops", None), "OpOverloadPacket", None)


def operator_called(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return the name of the operator that ``args`` begin with, in its form as a method, and its arguments."""
    name = getattr(args[0], "__name__", "") if args else ""
    return (name.partition(".")[0], args[1:]) if name else ("__call__", args)


def function_apply() -> tuple[Any, str, Any]:
    """Return (owner, name, function taking the class first) of the ``apply`` that makes the Node of a custom Function.

    A classmethod in Python up to 2.14; since 2.15 the C class's own, which takes the class as its first argument.
    """
    owner = torch.autograd.Function
    method = next(vars(kind)["apply"] for kind in owner.__mro__ if "apply" in vars(kind))
    return owner, "apply", getattr(method, "__func__", method)


def taking_activations() -> list[Any]:
    """Return the functions of torch whose defaults are activations of ``torch.nn.functional``, compared by identity."""
    names = ("Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer")
    return [getattr(torch.nn, name).__init__ for name in names if hasattr(torch.nn, name)]


def vf_module() -> Any:
    """Return the module object by which ``torch.nn.functional`` calls builtin functions."""
    return torch._VF


class ShownToJit:
    """Wrappers that ``torch.jit.script`` accepts in place of their builtins, from ``put`` to ``undo``.

    Missing table: nothing is done, and scripting a function that calls a wrapper fails with an unknown builtin.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Look up what the compiler's table has for each original of the (original, wrapper)."""
        table_of = getattr(_jit_builtins, "_get_builtin_table", None)
        self._table: dict[int, str] = {} if table_of is None else table_of()
        known = self._table
        self._added = {id(wrapper): known[id(original)] for original, wrapper in pairs if id(original) in known}

    def put(self) -> None:
        """Add the wrappers to the table."""
        self._table.update(self._added)

    def undo(self) -> None:
        """Remove them."""
        for key in self._added:
            self._table.pop(key, None)


def is_builtin_of_scripts(function: Any) -> bool:
    """Whether ``torch.jit.script`` takes a function for an operator of its own. Missing table: no."""
    table_of = getattr(_jit_builtins, "_get_builtin_table", None)
    return table_of is not None and id(function) in table_of()


class ShownToModes:
    """Wrappers that ``__torch_function__`` is given in place of their originals, from ``put`` to ``undo``.

    Programs, and passes over graphs of ``torch.fx``, test ``func is torch.add``. A builtin looks itself up in a type
    that can only be changed through its dictionary; an operator in Python refers to itself by a closure variable.
    Missing type: there ``is`` distinguishes the wrapper from the builtin, and ``==`` does not.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Find where each original of the (original, wrapper) refers to itself."""
        self._kind = type(getattr(torch._C, "_VariableFunctions", None))
        self._entries: dict[str, Any] = gc.get_referents(vars(self._kind))[0]
        self._before: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}
        self._cells: list[tuple[Any, Any, Any]] = []
        for original, wrapper in pairs:
            name = getattr(original, "__name__", "")
            entry = self._entries.get(name)
            if isinstance(entry, staticmethod) and entry.__func__ is original:
                self._before[name], self._wrappers[name] = entry, staticmethod(wrapper)
            for cell in getattr(original, "__closure__", None) or ():
                if cell.cell_contents is original:
                    self._cells.append((cell, original, wrapper))

    def put(self) -> None:
        """Put the wrappers there."""
        self._entries.update(self._wrappers)
        for cell, _, wrapper in self._cells:
            cell.cell_contents = wrapper
        _forget_attributes(self._kind)

    def undo(self) -> None:
        """Restore the originals."""
        self._entries.update(self._before)
        for cell, original, _ in self._cells:
            cell.cell_contents = original
        _forget_attributes(self._kind)


def _forget_attributes(kind: type) -> None:
    """Invalidate CPython's attribute caches of a type."""
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def checked_operator(error: BaseException) -> Any:
    """Return the Python function behind the custom operator whose schema check failed.

    Read from the frames of the error and of its causes. Missing: None, and no line of it is named.
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


def script_compilers() -> list[tuple[Any, str]]:
    """Return (namespace, name) of the functions that compile source for ``torch.jit.script``.

    Missing: scripts that call Python functions of torch which gradsan wraps cannot be compiled while it is on.
    """
    methods = getattr(torch.jit, "_recursive", None)
    found = [(torch._C, "_jit_script_compile"), (methods, "create_methods_and_properties_from_stubs")]
    return [(owner, name) for owner, name in found if hasattr(owner, name)]


def with_lookup(argument: Any, change: Callable[[Callable[[str], Any]], Callable[[str], Any]]) -> Any:
    """Return an argument of such a compiler with every name-lookup callback in it changed by ``change``."""
    if isinstance(argument, FunctionType):
        return change(argument)
    if isinstance(argument, (list, tuple)) and not hasattr(argument, "_replace"):
        return [with_lookup(one, change) for one in argument]
    if hasattr(argument, "resolution_callback"):
        return argument._replace(resolution_callback=change(argument.resolution_callback))
    return argument
