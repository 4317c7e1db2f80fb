"""Value of an expression in a frame, found without running any of the program's code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from gradsan import _torch

_MISSING = object()


def tensor_of(frame: FrameType, text: str) -> Any:
    """The tensor that ``text`` (``w``, ``self.lin.weight``, ``xs[0]``) is in ``frame``; None where it is none."""
    value = value_of(frame, text)
    return value if torch.is_tensor(value) else None


def value_of(frame: FrameType, text: str) -> Any:
    """What ``text`` is in ``frame``, None where that cannot be decided.

    Only names, attributes that objects keep themselves, and elements of Python's own containers are looked up.
    """
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    value = _value(node, frame)
    return None if value is _MISSING else value


def first_named(frame: FrameType, names: list[str], wanted: Callable[[Any], bool]) -> tuple[str, Any] | None:
    """The first of the expressions ``names`` that is a tensor for which ``wanted`` holds, and the tensor."""
    for name in names:
        tensor = tensor_of(frame, name)
        if tensor is not None and wanted(tensor):
            return name, tensor
    return None


def own_attribute(owner: Any, name: str, missing: Any) -> Any:
    """What an object itself keeps under a name, a module its parameters, buffers and children; else ``missing``."""
    if isinstance(owner, nn.Module):
        for kept in (*map(dict.items, _torch.own_tensors(owner)), owner.named_children()):
            for known, value in kept:
                if known == name:
                    return value
    variables = getattr(owner, "__dict__", None)
    return variables.get(name, missing) if isinstance(variables, Mapping) else missing


def _value(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Name):
        local = frame.f_locals
        return local[node.id] if node.id in local else frame.f_globals.get(node.id, _MISSING)
    if isinstance(node, ast.Attribute):
        return own_attribute(_value(node.value, frame), node.attr, _MISSING)
    if isinstance(node, ast.Subscript):
        key = _key(node.slice, frame)
        return _MISSING if key is _MISSING else _element(_value(node.value, frame), key)
    return _MISSING


def _key(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    found = _value(node, frame) if isinstance(node, ast.Name) else _MISSING
    return found if isinstance(found, int | str) else _MISSING


def _element(owner: Any, key: Any) -> Any:
    if type(owner) not in (list, tuple, dict):
        return _MISSING
    try:
        return owner[key]
    except (KeyError, IndexError, TypeError):
        return _MISSING
