"""``torch.jit.script`` compiles under gradsan what it compiles without, and gradsan goes on watching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradsan
from gradsan.record.patches import Patches

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def activated(x: torch.Tensor) -> torch.Tensor:
    return F.relu(torch.sigmoid(x) - 0.5) + F.dropout(x, 0.5, False)


def through_another(x: torch.Tensor) -> torch.Tensor:
    return activated(x).mul_(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(self.layers(x), 0.1, True)


@pytest.fixture(params=[True, False], ids=["native", "pure"])
def watched(request: pytest.FixtureRequest) -> Iterator[None]:
    with gradsan.watch(native=request.param):
        yield


@pytest.mark.parametrize("function", [activated, through_another])
def test_a_function(function: object, watched: None) -> None:
    x = torch.randn(5)
    torch.jit._state._jit_caching_layer.clear()  # what was scripted before would not be compiled again
    scripted = torch.jit.script(function)
    assert torch.equal(scripted(x), function(x))  # type: ignore[operator]
    assert "relu" in str(getattr(scripted, "inlined_graph"))  # noqa: B009 - only the graph's text counts


def test_a_function_that_imported_a_wrapper_by_name(watched: None) -> None:
    from torch.nn.functional import batch_norm, relu6

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return relu6(batch_norm(x, None, None, training=True))

    x = torch.randn(4, 3)
    assert torch.equal(torch.jit.script(normalised)(x), normalised(x))


def test_operators_that_a_detector_listens_to(watched: None) -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        return torch.gt(x, torch.as_tensor(0.0)).to(x.dtype) + torch.as_tensor([1.0, 2.0], dtype=torch.float64)[0]

    x = torch.randn(5)
    assert torch.equal(torch.jit.script(made)(x), made(x))


def test_the_compiler_knows_every_operator_that_it_knows_without(monkeypatch: pytest.MonkeyPatch) -> None:
    find = torch.jit._builtins._find_builtin  # type: ignore[attr-defined]
    owners = (torch, F, torch._C._nn, torch._VF, torch.functional, torch.linalg, torch.fft, torch.special)
    known = {(owner, name): find(getattr(owner, name, None)) for owner in owners for name in dir(owner)}
    differing: list[str] = []
    compile_ = torch._C._jit_script_compile

    def compiling(*args: object) -> object:
        differing.extend(name for (owner, name), op in known.items() if find(getattr(owner, name, None)) != op)
        return compile_(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(torch._C, "_jit_script_compile", compiling)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with gradsan.watch():
        torch.jit.script(doubled)
    assert len([op for op in known.values() if op]) > 1000
    assert differing == []


def test_a_module(watched: None) -> None:
    net, x = Net().eval(), torch.randn(2, 1, 6, 6)
    assert torch.equal(torch.jit.script(net)(x), net(x))


def test_the_wrappers_are_back_afterwards(watched: None) -> None:
    before = F.relu, F.batch_norm
    torch.jit.script(activated)
    assert (F.relu, F.batch_norm) == before
    assert all(hasattr(function, "_gradsan_original") for function in (F.relu, F.batch_norm))

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return F.relu(x, nothing=1)  # type: ignore[call-arg]

    with pytest.raises(RuntimeError, match="nothing"):
        torch.jit.script(wrong)
    assert F.relu is before[0]


def test_patches_undone_meanwhile_stay_undone() -> None:
    original, patches = F.silu, Patches()
    patches.set(F, "silu", lambda x: x)
    patches.set(F, "silu", lambda x: x + 1)
    with patches.aside(lambda owner, *_: owner is F) as originals:
        assert F.silu is original
        assert set(originals.values()) == {original}
        patches.undo()
    assert F.silu is original
