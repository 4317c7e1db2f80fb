"""Names of a tensor, from live variables."""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import threading
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradsan
from gradsan._collector import objects_of
from gradsan.graph import naming, variables


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


@pytest.mark.parametrize("kind", [types.SimpleNamespace, argparse.Namespace])
def test_containers_of_any_value_are_searched(kind: type) -> None:
    weight = torch.ones(3)
    assert "args.weight" in names_here(weight, args=kind(weight=weight))


def test_a_module_that_only_a_library_keeps_in_private_is_named_by_its_class() -> None:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1)

    class Trainer:
        def __init__(self) -> None:
            self._module = Critic()

    trainer, library = Trainer(), argparse.Namespace(_module=Critic())
    assert names_here(trainer._module.head.bias)[0] == "trainer._module.head.bias"
    assert names_here(library._module.head.bias)[0] == "Critic.head.bias"
    del trainer
    assert naming.owner_of("Critic.head.bias", sys._getframe()) == (library._module, "head.bias")


def test_a_named_tuple_is_searched() -> None:
    weight = torch.ones(3)
    pair = collections.namedtuple("Pair", "weight bias")(weight, torch.zeros(3))
    assert "pair.weight" in names_here(weight, pair=pair)


@pytest.mark.parametrize("kind", [list, tuple, collections.deque, lambda items: dict(enumerate(items))])
def test_of_a_long_container_both_ends_are_searched(kind: Callable[[list[object]], object]) -> None:
    weight = torch.ones(3)
    for position in (0, 100, 5_000, 9_950, 9_999):
        items: list[object] = [[number] for number in range(10_000)]
        items[position] = weight
        assert names_here(weight, items=kind(items))[-1] == f"items[{position}]"


def test_a_large_data_set_neither_slows_a_search_nor_hides_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million samples took seconds in each round that was looked at."""
    steps, make = itertools.count(), variables._Step
    monkeypatch.setattr(variables, "_Step", lambda *args: (next(steps), make(*args))[1])
    weight = torch.ones(3)
    samples = [[[[label] for label in range(500)] for _ in range(600)]] * 300
    assert names_here(weight, samples=samples, state={"weights": [weight]})[-1] == 'state["weights"][0]'
    assert next(steps) < 100_000


def test_a_view_that_has_no_grad_fn_any_more_does_not_end_the_search() -> None:
    """PyTorch refuses one to the pieces of what was written: a live one cost the whole diagnosis."""
    whole = torch.exp(torch.ones(3, 2, requires_grad=True))
    rows = whole.unbind(0)
    whole[:, 0] -= 1
    assert names_here(whole, rows=rows, whole=whole)[0] == "whole"


def test_debuggers_and_test_runners_are_not_searched(request: pytest.FixtureRequest) -> None:
    weight = torch.ones(3)
    watched = gradsan.watch()
    watched.kept = weight  # type: ignore[attr-defined]
    request.config.kept = weight  # type: ignore[attr-defined]
    try:
        names = names_here(weight, watched=watched, request=request)
        assert names
        assert not any("kept" in name for name in names)
    finally:
        del request.config.kept  # type: ignore[attr-defined]


@pytest.mark.parametrize("core", ["native", "pure"])
def test_no_other_thread_meets_the_list_of_all_objects(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tuple`` fails where somebody else refers to the tuple that it fills."""

    class Marked:
        pass

    if core == "pure":
        monkeypatch.setitem(sys.modules, "gradsan.record._native", None)
    failed: list[SystemError] = []
    ended = threading.Event()

    def fill() -> None:
        try:
            while not ended.is_set():
                tuple(number for number in range(30))
        except SystemError as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=fill, daemon=True) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(80):
            marked = [Marked() for _ in range(5)]
            assert set(map(id, objects_of({Marked}))) == set(map(id, marked))
            assert not failed
    finally:
        ended.set()
        sys.setswitchinterval(interval)
    for thread in threads:
        thread.join()


class Renamed(torch.nn.Module):
    """Lists its inner modules by names that no attributes have, as wrappers of models do."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Identity()
        self.inner.state = torch.ones(2, requires_grad=True).exp()

    def named_modules(self, *args, **kwargs):
        yield "", self
        yield "wrapped.inner", self.inner


def test_modules_that_list_their_inner_ones_by_other_names_are_searched():
    net = Renamed()
    assert "net.wrapped.inner.state" in names_here(net.inner.state, net=net)
