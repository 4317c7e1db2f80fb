"""Tables of operations and layers: the autograd Node that a call makes, and the tensors that Node saves."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from gradsan.diagnose.needs import Slot, inputs_of, slots_of
from gradsan.source.flow.cuts import CUTTING_METHODS
from gradsan.source.methods import MADE_FROM_NOTHING

_ROW = re.compile(r"(~?)(\w+)\((.*)\)")
# Results that the Node saves and the call returns.
_RESULTS = frozenset({"result", "result0", "output"})


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: its Node, the inputs for its arguments, and the saved slots, with its result or without."""

    name: str
    node: str
    inputs: tuple[str, ...]
    slots: tuple[Slot, ...]
    keeps_result: bool


@cache
def operation(name: str) -> Operation | None:
    """The operation that a method or function called ``name`` runs; None where it is not known."""
    row = _tables()["ops"].get(name)
    if row is not None:
        found = _ROW.fullmatch(row)
        assert found is not None, name
        hidden, node, given = found.groups()
        names = tuple(part.strip() for part in given.split(","))
        slots = () if node == "none" else slots_of(node)
        return _made(name, node, names, slots, not hidden)
    # ``exp_`` runs what ``exp`` does; a few have a Node of their own in place (``LeakyReluBackward1``).
    node = "".join(part.capitalize() for part in name.split("_")) + "Backward0"
    if name.endswith("_") and not name.endswith("__"):
        own = node.removesuffix("0") + "1"
        plain = operation(name[:-1])
        is_own = any(slot.is_output for slot in slots_of(own)) and name in _IN_PLACE_OF_THEIR_OWN
        return _made(name, own, ("self",), slots_of(own), True) if is_own else plain
    inputs = inputs_of(node)
    return None if inputs is None else _made(name, node, inputs, slots_of(node), True)


_IN_PLACE_OF_THEIR_OWN = frozenset({"leaky_relu_", "elu_", "celu_"})


def _made(name: str, node: str, inputs: tuple[str, ...], slots: tuple[Slot, ...], shown: bool) -> Operation:
    keeps = shown and any(slot.is_output and slot.name in _RESULTS for slot in slots)
    return Operation(name, node, inputs, slots, keeps)


@cache
def layer_operation(kind: str) -> tuple[str, bool] | None:
    """The operation that a layer of ``torch.nn`` runs, and whether it has parameters; None for an unknown layer."""
    row = _tables()["layers"].get(kind)
    if row is None:
        return None
    name, _, weights = str(row).partition(" ")
    return name, weights == "+"


@cache
def without_gradient(name: str) -> bool:
    """Whether the result of a method or function of torch called ``name`` has no graph, whatever its arguments."""
    return name in MADE_FROM_NOTHING or name in CUTTING_METHODS or name in _tables()["without_gradient"]["names"]


@cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    # tomllib came with Python 3.11; tomli is the same module for 3.10.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = Path(__file__).with_name("ops.toml").read_text(encoding="utf-8")
    return cast("Mapping[str, Mapping[str, Any]]", toml.loads(text))
