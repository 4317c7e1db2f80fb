"""What live variables call a tensor."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from gradsan.capture import naming


def names_here(tensor: torch.Tensor, **variables: object) -> list[str]:
    """The names by which a frame with ``variables`` reaches ``tensor``."""
    space: dict[str, object] = {**variables, "here": lambda: naming.names_of(tensor, sys._getframe(1))}
    exec(compile("found = here()", __file__, "exec"), space)
    return [name.text for name in space["found"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("inner", [False, True])
def test_a_compiled_module_is_called_as_if_it_were_not(inner: bool) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain[1].kept = torch.zeros(3)  # type: ignore[assignment]
    weight, kept = plain[1].weight, plain[1].kept
    model = nn.ModuleDict({"net": torch.compile(plain)}) if inner else torch.compile(plain)
    prefix = "model.net" if inner else "model"
    assert f"{prefix}.1.weight" in names_here(weight, model=model)  # type: ignore[arg-type]
    assert f"{prefix}.1.kept" in names_here(kept, model=model)  # type: ignore[arg-type]
    assert not any("_orig_mod" in name for name in names_here(weight, model=model))  # type: ignore[arg-type]
