"""Derive ``needs.json``: which tensors each autograd Node saves, and the derivative formulas that read them.

    python tools/derive_needs.py            rewrite the committed file from the installed torch
    python tools/derive_needs.py --check    exit with 1 where the committed file differs from what would be written

Source of the facts: the files the torch wheel itself carries for code generation,
``torchgen/packaged/autograd/derivatives.yaml`` and ``torchgen/packaged/ATen/native/{native_functions,tags}.yaml``,
read with torchgen's own ``load_derivatives``, so Node class names and slot names are those of the compiled torch.
Needs PyYAML. The output depends on nothing but the torch version.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torchgen
from torchgen.api.autograd import Derivative, DifferentiabilityInfo, SavedAttribute, match_differentiability_info
from torchgen.api.types import (
    ArrayRefCType,
    BaseCType,
    ListCType,
    MutRefCType,
    NamedCType,
    OptionalCType,
    SpecialArgName,
    VectorCType,
    iTensorListRefT,
    tensorListT,
    tensorT,
)
from torchgen.gen import parse_native_yaml
from torchgen.packaged.autograd.load_derivatives import load_derivatives

OUTPUT = Path(__file__).resolve().parent.parent / "src" / "gradsan" / "diagnose" / "needs.json"

_TENSOR = BaseCType(tensorT)
# The types that torchgen's gen_autograd_functions.save_var stores as SavedVariable; all others are sizes and scalars.
_SAVED_VARIABLE_TYPES = (
    _TENSOR,
    OptionalCType(_TENSOR),
    MutRefCType(_TENSOR),
    MutRefCType(OptionalCType(_TENSOR)),
    BaseCType(tensorListT),
    BaseCType(iTensorListRefT),
    VectorCType(_TENSOR),
    ArrayRefCType(_TENSOR),
    ListCType(OptionalCType(_TENSOR)),
)


def _name(ctype: NamedCType) -> str:
    return str(ctype.name.name if isinstance(ctype.name, SpecialArgName) else ctype.name)


def _tensor_slots(saved: Iterable[SavedAttribute]) -> set[str]:
    return {_name(attribute.nctype) for attribute in saved if attribute.nctype.type in _SAVED_VARIABLE_TYPES}


def _generated_from(info: DifferentiabilityInfo) -> str | None:
    """The Node whose derivative torch's build turned into that of a foreach function, or None."""
    overload = info.func.func.name.overload_name
    generated = info.name.startswith("_foreach_") and any("grads[i]" in one.formula for one in info.derivatives)
    return str(info.op).removeprefix("Foreach").removesuffix(overload) if generated else None


def _key(derivative: Derivative) -> str:
    return ", ".join(derivative.var_names)


def _only_described(slot: str, derivative: Derivative) -> bool:
    """Whether a formula asks only for the slot's dtype or sizes.

    Torch saves those instead of the tensor where it can, but the derivatives it generates for foreach functions keep
    the tensors all the same.
    """
    rest = re.sub(r"\w+(\[i\])?\.(scalar_type|layout|dim|options|sym_\w+)\(\)", "", derivative.formula)
    return not re.search(rf"\b{slot}\b", rest)


def _describe(info: DifferentiabilityInfo) -> dict[str, Any]:
    """One Node: ``op``, its differentiable ``inputs`` in the order of its gradients, and what it saves.

    ``saved`` maps each slot that holds tensors to keys of ``formulas``; ``outputs`` lists the slots among them that
    are results of the operation itself, ``shape`` those of which only the dtype or the sizes are asked for.
    ``foreach_of`` is the Node of the plain operation that a foreach function repeats.
    """
    node: dict[str, Any] = {
        "op": info.name.partition(".")[0],
        "inputs": [argument.name for argument in info.args_with_derivatives],
    }
    plain = _generated_from(info)
    keepers: dict[str, list[Derivative]] = {}
    for derivative in info.derivatives:
        for slot in _tensor_slots((*derivative.saved_inputs, *derivative.saved_outputs)):
            keepers.setdefault(slot, []).append(derivative)
    readers = {
        slot: [one for one in derivatives if not _only_described(slot, one)] for slot, derivatives in keepers.items()
    }
    saved = {slot: sorted(map(_key, readers[slot] or keepers[slot])) for slot in sorted(keepers)}
    # original_formula of a generated derivative is that of the plain operation; formula names the lists.
    texts = {_key(one): one.formula if plain else one.original_formula for one in info.derivatives}
    used = {key for keys in saved.values() for key in keys}
    optional = {
        "foreach_of": plain,
        "saved": saved,
        "formulas": {key: " ".join(text.split()) for key, text in texts.items() if key in used},
        "outputs": sorted(_tensor_slots(info.all_saved_outputs)),
        "shape": sorted(slot for slot, derivatives in readers.items() if not derivatives),
    }
    return {**node, **{key: value for key, value in optional.items() if value}}


def derive() -> dict[str, Any]:
    """Return the whole table for the installed torch, as plain JSON-able data."""
    packaged = Path(torchgen.__file__).parent / "packaged"
    native, tags = (str(packaged / "ATen" / "native" / name) for name in ("native_functions.yaml", "tags.yaml"))
    infos, _ = load_derivatives(str(packaged / "autograd" / "derivatives.yaml"), native, tags)
    # Adds the derivatives that torch generates for foreach functions to infos, as torch's own build does.
    match_differentiability_info(parse_native_yaml(native, tags).native_functions, infos)
    nodes = {info.op: _describe(info) for by_key in infos.values() for info in by_key.values() if info.op}
    return {
        "about": "Generated by tools/derive_needs.py from the torch wheel's derivatives.yaml; do not edit.",
        "torch": torch.__version__.partition("+")[0],
        "nodes": dict(sorted(nodes.items())),
    }


def render(table: dict[str, Any]) -> str:
    """Return the file's text: JSON with one Node per line, so that a new torch version gives a readable diff."""
    lines = [
        f"    {json.dumps(name)}: {json.dumps(node, separators=(',', ':'), sort_keys=True)}"
        for name, node in table["nodes"].items()
    ]
    head = "".join(f"  {json.dumps(key)}: {json.dumps(table[key])},\n" for key in ("about", "torch"))
    return "{\n" + head + '  "nodes": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the committed file; return the exit status."""
    parser = argparse.ArgumentParser(description="Derive src/gradsan/diagnose/needs.json from the installed torch.")
    parser.add_argument("--check", action="store_true", help="only compare with the committed file")
    options = parser.parse_args(arguments)
    text = render(derive())
    if not options.check:
        OUTPUT.write_text(text, encoding="utf-8")
        return 0
    if OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    print(f"{OUTPUT.name} is not what torch {torch.__version__} gives; run tools/derive_needs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
