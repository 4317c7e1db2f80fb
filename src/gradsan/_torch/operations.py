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


def parameters_of(*optimizers: Any) -> list[Any]:
    """All that optimizers have in their groups, in order."""
    return [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]


def optimizer_folder() -> str:
    """The folder of torch's own optimizers, whose inner writes are accounted for per step."""
    return str(Path(torch.optim.__file__).parent) + os.sep


def package_folder() -> str:
    """The folder torch is installed in."""
    return str(Path(torch.__file__).parent) + os.sep


_METHODS_IN_C = (MethodDescriptorType, WrapperDescriptorType)


def marks_of(original: Any) -> dict[str, Any]:
    """What a wrapper says of its original: itself, and its name where it is a method in C, looked up on an instance."""
    is_method = isinstance(getattr(original, "_gradsan_original", original), _METHODS_IN_C)
    method = original.__name__ if is_method else None
    return {"_gradsan_original": original, "_gradsan_method": method}


def dress(wrapper: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Give ``wrapper`` the name, documentation and signature of ``original``, and the marks of a wrapper."""
    dressed = functools.wraps(original)(wrapper)
    vars(dressed).update(marks_of(original))
    return dressed


def all_schemas() -> list[Any]:
    """The schema of every operator known to the dispatcher."""
    return list(torch._C._jit_get_all_schemas())


def function_namespaces() -> list[Any]:
    """Every namespace of torch that holds builtin functions which may write to a tensor."""
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
    """The builtin behind ``torch.<name>``, None where there is none."""
    return getattr(torch._C._VariableFunctions, name, None)


def operator_class() -> Any:
    """The class of ``torch.ops.<library>.<op>.<overload>``. Missing: operators called directly are a blind spot."""
    return getattr(getattr(torch, "_ops", None), "OpOverload", None)


def operator_packet_class() -> Any:
    """The class of ``torch.ops.<library>.<op>``; as for :func:`operator_class`."""
    return getattr(getattr(torch, "_ops", None), "OpOverloadPacket", None)


def operator_called(args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The name of the operator that ``args`` begin with, as a method has it, and what it was called with."""
    name = getattr(args[0], "__name__", "") if args else ""
    return (name.partition(".")[0], args[1:]) if name else ("__call__", args)


def function_apply() -> tuple[Any, str, Any]:
    """(owner, name, function taking the class first) of what makes the Node of every custom Function.

    A classmethod in Python up to 2.14; since 2.15 the C class's own, which takes the class as its first argument.
    """
    owner = torch.autograd.Function
    method = next(vars(kind)["apply"] for kind in owner.__mro__ if "apply" in vars(kind))
    return owner, "apply", getattr(method, "__func__", method)


def taking_activations() -> list[Any]:
    """The functions of torch that have one of ``torch.nn.functional`` for a default, and ask which it is."""
    names = ("Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer")
    return [getattr(torch.nn, name).__init__ for name in names if hasattr(torch.nn, name)]


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


def show_to_modes(pairs: Iterable[tuple[Any, Any]]) -> Callable[[], None]:
    """Let each ``__torch_function__`` be given the wrapper in place of what it wraps; returns how to undo that.

    Programs, and passes over graphs of ``torch.fx``, ask ``func is torch.add``. A builtin looks itself up in a type
    that is written to by its dictionary alone; an operator in Python names itself by a variable of its closure.
    Missing type: there ``is`` tells the wrapper and the builtin apart, and ``==`` does not.
    """
    kind = type(getattr(torch._C, "_VariableFunctions", None))
    entries: dict[str, Any] = gc.get_referents(vars(kind))[0]
    builtins: list[tuple[str, Any]] = []
    closures: list[tuple[Any, Any]] = []
    for original, wrapper in pairs:
        name = getattr(original, "__name__", "")
        entry = entries.get(name)
        if isinstance(entry, staticmethod) and entry.__func__ is original:
            entries[name] = staticmethod(wrapper)
            builtins.append((name, entry))
        for cell in getattr(original, "__closure__", None) or ():
            if cell.cell_contents is original:
                cell.cell_contents = wrapper
                closures.append((cell, original))
    _forget_attributes(kind)

    def undo() -> None:
        entries.update(builtins)
        for cell, original in closures:
            cell.cell_contents = original
        _forget_attributes(kind)

    return undo


def _forget_attributes(kind: type) -> None:
    """Empty the caches that CPython has of the attributes of a type."""
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


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
