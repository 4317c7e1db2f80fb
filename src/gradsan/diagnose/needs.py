"""Derivative formulas: the saved tensors of an autograd Node, and the gradients that need them.

Two files beside this one hold the facts. ``needs.json`` has every Node of one torch version and is derived from
the torch wheel (``tools/derive_needs.py``); ``formulas.toml`` has the formulas of common operations as a person
writes them. Both are read once, on first use.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

Reads = Literal["values", "shape", "mask"]

_GENERATED_NODE = re.compile(r"Backward(Autograd[A-Za-z]+?)?\d+\w*$")
_BACKEND_PREFIX = re.compile(r"^_?(native|cudnn|miopen|mps)_")
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@dataclass(frozen=True, slots=True)
class Need:
    """Why backward keeps one saved tensor.

    ``node`` is the Node's name (``AddmmBackward0``), ``slot`` the saved place in it (``mat2`` of ``_saved_mat2``) and
    ``op`` the name people use for the operation. ``gradient_of`` names the operation's inputs whose gradients need
    the slot, in the order of the operation's signature and by the names the formula uses; ``shown`` are those of them
    whose gradients the formula says, as the others come by way of the same values. ``inputs`` are all that are
    differentiable, in the order of the signature and by the same names. ``formula`` is one or
    several ``grad_<input> = ...``, separated by ``"; "``, followed by the definitions of intermediate values that
    involve the slot; a formula that is not ``curated`` is PyTorch's own C++ expression. ``is_output`` says that the
    slot is a result of the operation itself. ``reads`` is ``"shape"`` where backward never looks at the values,
    ``"mask"`` where it looks only at a sign, a comparison or the region a value lies in.
    """

    node: str
    slot: str
    op: str
    formula: str
    gradient_of: tuple[str, ...]
    shown: tuple[str, ...]
    inputs: tuple[str, ...]
    is_output: bool
    reads: Reads
    curated: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """A saved slot of a Node: its name, and the inputs whose gradients need it, those of one call together.

    ``is_output``: it is a result of the operation itself.
    """

    name: str
    asked_for: tuple[tuple[str, ...], ...]
    is_output: bool


@cache
def slots_of(node: str) -> tuple[Slot, ...]:
    """The slots of ``node`` that hold tensors; empty for a Node that the table does not have."""
    entry = _nodes().get(node, {})
    outputs = entry.get("outputs", ())
    saved: Mapping[str, list[str]] = entry.get("saved", {})
    return tuple(
        Slot(name, tuple(tuple(key.split(", ")) for key in keys), name in outputs) for name, keys in saved.items()
    )


@cache
def inputs_of(node: str) -> tuple[str, ...] | None:
    """The inputs of ``node`` that can have a gradient, in the order of its signature; None for an unknown Node."""
    entry = _nodes().get(node)
    return None if entry is None else tuple(entry["inputs"])


@cache
def need_of(node: str, slot: str) -> Need | None:
    """Return the need of a saved slot, or None for a Node or slot the table does not have.

    ``node`` is ``grad_fn.name()``, which is also the class name of all Nodes but those of foreach functions.
    None is returned for custom Functions, for Nodes newer than the table, and for slots that hold no tensor.
    A member of a slot that holds a list (``indices[1]``) has the need of the whole slot.
    """
    entry = _nodes().get(node, {})
    slot = slot.partition("[")[0]
    saved: Mapping[str, list[str]] = entry.get("saved", {})
    if slot not in saved:
        return None
    person = _formulas_of(node)
    written = _written(person, slot, entry["inputs"])
    formula, gradient_of, shown = written or _derived(entry, saved[slot])
    return Need(
        node=node,
        slot=slot,
        op=op_name(node),
        formula=formula,
        gradient_of=gradient_of,
        shown=shown,
        inputs=tuple(person.get("names", {}).get(name, name) for name in entry["inputs"]),
        is_output=slot in entry.get("outputs", ()),
        reads=_reads(entry, person, slot),
        curated=written is not None,
    )


@cache
def op_name(node: str) -> str:
    """Return the name people use for the operation of a Node.

    ``AddmmBackward0`` is ``addmm``, ``NativeLayerNormBackward0`` ``layer_norm``, ``LinalgInvExBackward0``
    ``linalg.inv``; the backward of a custom Function ``Foo`` (``FooBackward``) is ``Foo``.
    """
    node = node.rpartition("::")[2]
    aliases: Mapping[str, str] = _written_by_hand()["ops"]
    if node in aliases:
        return aliases[node]
    native = _nodes().get(node, {}).get("op")
    if native is None:
        if not _GENERATED_NODE.search(node):
            return node.removesuffix("Backward")
        native = _WORD_START.sub("_", _GENERATED_NODE.sub("", node)).lower()
    return native if native.startswith("_foreach_") else _public_name(native, aliases)


def _public_name(native: str, aliases: Mapping[str, str]) -> str:
    plain = native.strip("_").removesuffix("_forward")
    shorter = _BACKEND_PREFIX.sub("", plain)
    for name in (plain, shorter):
        if name in aliases:
            return aliases[name]
    for module in ("linalg_", "special_"):
        if shorter.startswith(module):
            return f"{module[:-1]}.{shorter.removeprefix(module).removesuffix('_ex')}"
    return shorter


def _reads(entry: Mapping[str, Any], person: Mapping[str, Any], slot: str) -> Reads:
    if slot in entry.get("shape", ()) or slot in person.get("shape", ()):
        return "shape"
    return "mask" if slot in person.get("mask", ()) else "values"


def _derived(entry: Mapping[str, Any], keys: Iterable[str]) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The formulas of ``needs.json`` under those keys; a key joins the inputs whose gradients come in one call."""
    inputs: list[str] = entry["inputs"]
    groups = sorted((key.split(", ") for key in keys), key=lambda group: inputs.index(group[0]))
    formula = "; ".join(
        f"{', '.join(f'grad_{name}' for name in group)} = {entry['formulas'][', '.join(group)]}" for group in groups
    )
    names = tuple(sorted({name for group in groups for name in group}, key=inputs.index))
    return formula, names, names


def _written(
    person: Mapping[str, Any], slot: str, inputs: list[str]
) -> tuple[str, tuple[str, ...], tuple[str, ...]] | None:
    """The formulas of ``formulas.toml`` that involve the slot, or None where there are none.

    Where some name the slot themselves, only those are shown; otherwise the first that involves it.
    """
    names: Mapping[str, str] = person.get("names", {})
    name = names.get(slot, slot)
    let: Mapping[str, str] = person.get("let", {})
    on_the_way: set[str] = set()
    while more := {key for key, text in let.items() if _mentioned(text) & {name, *on_the_way}} - on_the_way:
        on_the_way |= more
    gradients = {key: person[f"grad_{key}"] for key in inputs if f"grad_{key}" in person}
    involved = [key for key in gradients if _mentioned(gradients[key]) & {name, *on_the_way}]
    if not involved:
        return None
    direct = [key for key in involved if name in _mentioned(gradients[key])]
    shown = direct or involved[:1]
    parts = [f"grad_{names.get(key, key)} = {gradients[key]}" for key in shown]
    if not direct:
        parts += [f"{key} = {text}" for key, text in let.items() if key in on_the_way]
    return "; ".join(parts), tuple(names.get(key, key) for key in involved), tuple(names.get(key, key) for key in shown)


@cache
def _mentioned(expression: str) -> frozenset[str]:
    """The variables and functions a formula names."""
    return frozenset(found.id for found in ast.walk(ast.parse(expression)) if isinstance(found, ast.Name))


def _formulas_of(node: str) -> Mapping[str, Any]:
    own: Mapping[str, Any] = _written_by_hand().get(node, {})
    entry = _nodes().get(node, {})
    plain: str | None = entry.get("foreach_of")
    if plain and _nodes().get(plain, {}).get("inputs") == entry["inputs"]:
        return _formulas_of(plain)
    return {**_formulas_of(own["like"]), **own} if "like" in own else own


@cache
def _nodes() -> Mapping[str, Mapping[str, Any]]:
    text = Path(__file__).with_name("needs.json").read_text(encoding="utf-8")
    return cast("Mapping[str, Mapping[str, Any]]", json.loads(text)["nodes"])


@cache
def _written_by_hand() -> Mapping[str, Mapping[str, Any]]:
    # tomllib came with Python 3.11; tomli is the same module for 3.10.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = Path(__file__).with_name("formulas.toml").read_text(encoding="utf-8")
    return cast("Mapping[str, Mapping[str, Any]]", toml.loads(text))


def has_saved_written(name: str, operands: Sequence[str]) -> bool:
    """Whether a Node has saved an operand that was written since: a gradient of one of the others needs it."""
    inputs = inputs_of(name) or ()
    if len(inputs) != len(operands):
        return False  # one of them is a list
    states = dict(zip(inputs, operands, strict=True))
    return any(
        states.get(slot.name) == "written"
        and any(states.get(one, "constant") != "constant" for group in slot.asked_for for one in group)
        for slot in slots_of(name)
        if not slot.is_output
    )
