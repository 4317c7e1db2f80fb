"""Custom Functions whose backward may be run again on the side, because it has no effect but its result.

Judged by the bytecode: it computes with its arguments, saved tensors, plain data on ``ctx`` and plain
constants, by functions of torch that write nothing and draw no random numbers. Any other code is not
run: a call of anything else, ``with``, an inner function, an assignment to anything but a local variable.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.nn import functional

from gradsan import _torch
from gradsan.graph.bytecode import functions_of, getattr_static


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IGNORED = _words("CACHE EXTENDED_ARG PUSH_NULL NOP RESUME PRECALL NOT_TAKEN KW_NAMES")
_KNOWN = _words(
    """
    LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_AND_CLEAR LOAD_FAST_BORROW_LOAD_FAST_BORROW
    STORE_FAST STORE_FAST_STORE_FAST STORE_FAST_LOAD_FAST
    LOAD_CONST LOAD_SMALL_INT LOAD_CONST_IMMORTAL LOAD_ATTR LOAD_METHOD LOAD_GLOBAL LOAD_DEREF COPY_FREE_VARS
    CALL CALL_KW CALL_METHOD CALL_FUNCTION CALL_FUNCTION_KW
    BINARY_OP BINARY_SUBSCR BINARY_SLICE BUILD_SLICE BUILD_TUPLE BUILD_LIST UNPACK_SEQUENCE STORE_SUBSCR
    BINARY_ADD BINARY_SUBTRACT BINARY_MULTIPLY BINARY_TRUE_DIVIDE BINARY_POWER BINARY_MATRIX_MULTIPLY
    BINARY_FLOOR_DIVIDE BINARY_MODULO BINARY_AND BINARY_OR BINARY_XOR BINARY_LSHIFT BINARY_RSHIFT
    COMPARE_OP IS_OP CONTAINS_OP UNARY_NEGATIVE UNARY_NOT UNARY_INVERT UNARY_POSITIVE TO_BOOL
    POP_TOP DUP_TOP ROT_TWO ROT_THREE COPY SWAP RETURN_VALUE RETURN_CONST LIST_TO_TUPLE LIST_EXTEND GEN_START
    POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE
    JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP JUMP_FORWARD JUMP_BACKWARD JUMP_ABSOLUTE
    GET_ITER FOR_ITER END_FOR POP_ITER
    """
)
_WRITES = _words(
    """batch_norm instance_norm embedding dropout rrelu rand bernoulli multinomial poisson normal_ fused_ from_file
    gumbel fractional fake_quantize _out unsafe"""
)
"""Parts of the names of functions that write, or draw random numbers."""
_NO_METHODS = _words(
    """backward register_hook register_post_accumulate_grad_hook retain_grad numpy storage untyped_storage typed_storage
    data_ptr data grad grad_fn resize resize_as reinforce module_load record_stream pin_memory share_memory normal
    dlpack"""
)
_FRESH = _words("clone zeros_like ones_like empty_like full_like new_zeros new_ones")
_BUILTINS = (abs, bool, enumerate, float, int, isinstance, len, list, max, min, range, round, sum, tuple, zip)
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_MODULES = (torch, functional, math)
_IN_KEY = ("LOAD_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "COMPARE_OP", "BINARY_OP", "UNARY_", "BUILD_", "BINARY_SUBSCR")
_DEEPEST = 3
_DECORATORS = frozenset({torch.autograd.function.__file__, torch.amp.autocast_mode.__file__})
"""The files of ``once_differentiable`` and ``custom_bwd``."""


def is_repeatable(node: Node, function: Any, gradients: list[Any]) -> bool:
    """Whether the backward of ``function``, whose Node is ``node``, may be run again with these gradients."""
    if any(type(one) not in _torch.PLAIN_TENSORS for one in gradients):
        return False
    data: dict[str, Any] = getattr(node, "__dict__", {})
    if not all(_is_plain(value) for value in data.values()):
        return False
    own = [one for name in ("backward", "vjp") for one in functions_of(getattr_static(function, name))]
    own = [one for one in own if one.__code__.co_filename not in _DECORATORS]
    return bool(own) and all(_is_pure(one, frozenset(data)) for one in own)


def is_pure(function: Any) -> bool:
    """Whether a function of the program's only computes with its arguments."""
    return isinstance(function, FunctionType) and _is_pure(function, frozenset())


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < _DEEPEST and all(_is_plain(one, depth + 1) for one in value)
    return isinstance(value, _PLAIN) or type(value) in _torch.PLAIN_TENSORS


def _is_pure(function: FunctionType, on_context: frozenset[str]) -> bool:
    code = function.__code__
    if any(isinstance(one, CodeType) for one in code.co_consts) or function.__code__.co_cellvars:
        return False
    if any(isinstance(one, tuple) and not {"out", "inplace"}.isdisjoint(_names(one)) for one in code.co_consts):
        return False
    names = on_context | {"saved_tensors", "needs_input_grad"}
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _IGNORED]
    module: ModuleType | None = None
    for position, one in enumerate(instructions):
        if one.opname not in _KNOWN or (one.opname == "BINARY_OP" and one.argrepr.endswith("=")):
            return False
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = str(one.argval)
            is_known = _is_method(name) or name in names if module is None else _is_function(module, name)
            if not is_known:
                return False
        elif module is not None or (one.opname == "STORE_SUBSCR" and not _is_fresh(instructions, position)):
            return False
        module = None
        if one.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
            found = _value_of(function, str(one.argval))
            if any(found is one for one in _MODULES):
                module = found
            elif not _is_harmless_value(found):
                return False
    return True


def _names(constants: tuple[Any, ...]) -> set[str]:
    return {one for one in constants if isinstance(one, str)}


def _value_of(function: FunctionType, name: str) -> Any:
    code = function.__code__
    if name in code.co_freevars:
        try:
            return (function.__closure__ or ())[code.co_freevars.index(name)].cell_contents
        except (IndexError, ValueError):
            return function
    builtin = function.__globals__.get("__builtins__", {})
    held = builtin if isinstance(builtin, dict) else vars(builtin)
    return function.__globals__.get(name, held.get(name, function))


def _is_harmless_value(value: Any) -> bool:
    if any(value is one for one in _BUILTINS) or (_is_plain(value) and not isinstance(value, (list, torch.Tensor))):
        return True
    name = getattr(value, "__name__", None)
    if not isinstance(name, str) or not _is_function(torch, name):
        return False
    standing = getattr(torch, name)
    return standing is value or getattr(standing, "_gradsan_original", None) is value


def _is_harmless(name: str) -> bool:
    return not (name.startswith("_") or name.endswith("_") or name in _NO_METHODS or any(w in name for w in _WRITES))


@functools.lru_cache(maxsize=1024)
def _is_method(name: str) -> bool:
    """Whether a tensor's method or attribute of this name only reads."""
    return hasattr(torch.Tensor, name) and _is_harmless(name)


@functools.lru_cache(maxsize=1024)
def _is_function(module: ModuleType, name: str) -> bool:
    """Whether a module's attribute is plain data, or a function that only reads its arguments."""
    found = getattr(module, name, None)
    if module is math or (isinstance(found, _PLAIN[:-1]) and found is not None):
        return found is not None
    if not callable(found) or isinstance(found, type) or not _is_harmless(name):
        return False
    if hasattr(torch._C._VariableFunctions, name) and module is torch:
        return True
    if module is not functional:
        return False
    code = getattr(inspect.unwrap(found), "__code__", None)
    return code is None or "inplace" not in code.co_varnames


def _is_fresh(instructions: list[Any], position: int) -> bool:
    """Whether ``name[...] = ...`` writes into a variable that only ever holds a copy made here."""
    need, at = 1, position
    while need > 0 and at > 0:
        at -= 1
        # For other instructions in a key, the stack effect differs between Python versions.
        if not instructions[at].opname.startswith(_IN_KEY):
            return False
        need -= dis.stack_effect(instructions[at].opcode, instructions[at].arg)
    if need or at < 1 or instructions[at - 1].opname not in ("LOAD_FAST", "LOAD_FAST_BORROW"):
        return False
    name = instructions[at - 1].argval
    stores = [index for index, one in enumerate(instructions) if _stores_into(one, name)]
    return bool(stores) and all(_stores_copy(instructions, index) for index in stores)


def _stores_into(instruction: Any, name: str) -> bool:
    return instruction.opname.startswith("STORE_FAST") and name in (
        instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    )


def _stores_copy(instructions: list[Any], store: int) -> bool:
    if instructions[store].opname != "STORE_FAST" or not instructions[store - 1].opname.startswith("CALL"):
        return False
    for one in reversed(instructions[: store - 1]):
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return one.argval in _FRESH
        if not one.opname.startswith(("LOAD_FAST", "LOAD_CONST")):
            return False
    return False
