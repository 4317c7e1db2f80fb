"""Attributes are replaced and put back exactly, and without using up what CPython's caches of a type have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import gradsan
from cases import each
from gradsan.record import log, writes
from gradsan.record.patches import Patches, standing


class Base:
    kind = "base"

    def method(self) -> str:
        return "method"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @staticmethod
    def of_nobody() -> str:
        return "static"

    @property
    def value(self) -> int:
        return 1


class Derived(Base):
    pass


@each("name", ["kind", "method", "of_nobody", "value", "__eq__", "__doc__", "__name__", "mro"])
def test_attributes_are_those_that_python_gives(name: str) -> None:
    assert standing(Derived, name) == getattr(Derived, name)


def test_a_class_method_is_bound_to_the_class_that_was_asked() -> None:
    assert standing(Derived, "of_class")() == "Derived"


def test_missing_attributes_are_none() -> None:
    assert standing(Derived, "missing") is standing(torch, "missing") is None
    assert standing(torch, "add") is torch.add


def test_every_name_that_is_wrapped_is_read_as_python_reads_it() -> None:
    for one in writes.plan(log.make_core(False)).replacements:
        for name in one.wrappers:
            assert standing(one.owner, name) is getattr(one.owner, name)


def test_undoing_puts_back_own_attributes_and_removes_inherited_ones() -> None:
    before = dict(vars(Derived)), dict(vars(Base))
    patches = Patches()
    patches.set(Derived, "method", lambda self: "first")
    patches.set(Derived, "method", lambda self: "second")
    patches.set(Base, "kind", "other")
    patches.undo()
    assert (dict(vars(Derived)), dict(vars(Base))) == before


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_a_start_costs_a_type_few_of_its_thousand_versions(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version_of = pytest.importorskip("_testcapi").type_get_version
    replace = Patches.set
    thrown_away: Counter[str] = Counter()

    def count(patches: Patches, owner: Any, name: str, value: Any) -> None:
        if isinstance(owner, type) and version_of(owner):
            thrown_away[owner.__name__] += 1
        replace(patches, owner, name, value)

    monkeypatch.setattr(Patches, "set", count)
    torch.ones(1).add(1)
    assert version_of(torch.Tensor)
    with gradsan.watch(mode):
        torch.ones(1).add(1)
    assert thrown_away["Tensor"] >= 1, "this test counts"
    assert max(thrown_away.values()) <= 5
