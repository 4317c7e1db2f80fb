"""Every way of writing × what was saved × watch, deep and heal, on a device: the verdict is the truth there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsan
from ways import SAVED, WAYS, run, verdict

# The host would touch memory of the device.
BY_THE_HOST = {"a pointer"}
ON_DEVICES = [way for way in WAYS if way not in BY_THE_HOST]

# Watch mode copies nothing of a device, so it cannot see that the bytes are what they were.
NOT_COMPARED = {"data written with itself"}

# As on the CPU (``detect/test_ways.py``), but for the last three: what is handed out there is compared.
WATCH_MISSES = {
    "_unsafe_view, made before the save",
    "_unsafe_view, made after the save",
    "below ADInplaceOrView",
    "_unsafe_preserve_version_counter",
    "redispatch",
    "an operator with (a!) on memory",
    "dlpack, made before the save",
    "dlpack, made after the save",
}


def outcome(saved: str, way: str | None, device: str) -> tuple[Any, str | None]:
    """The gradient, or what PyTorch said instead; many ways hand memory to the host, which refuses that of a device."""
    try:
        return run(saved, way, device)
    except (TypeError, BufferError, NotImplementedError, RuntimeError, ValueError) as error:
        return None, f"refused: {type(error).__name__}"


def same(one: tuple[Any, str | None], other: tuple[Any, str | None]) -> bool:
    if one[1] is not None or other[1] is not None:
        return one[1] == other[1]
    return torch.equal(one[0].cpu(), other[0].cpu())


def truth_of(saved: str, way: str, device: str) -> str:
    gradient, said = outcome(saved, way, device)
    if said is not None:
        return "refused" if said.startswith("refused") else "raises"
    return "right" if same((gradient, None), outcome(saved, None, device)) else "wrong"


@pytest.fixture(scope="module", params=SAVED)
def truths(request: pytest.FixtureRequest, device: str) -> tuple[str, dict[str, str]]:
    return request.param, {way: truth_of(request.param, way, device) for way in ON_DEVICES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_the_verdict_is_the_truth(mode: Any, truths: tuple[str, dict[str, str]], device: str) -> None:
    saved, truth = truths
    plain = {way: outcome(saved, way, device) for way in ON_DEVICES}
    surprises = []
    with gradsan.watch(mode):
        for way in ON_DEVICES:
            with gradsan.watch(mode) as watched:
                came = outcome(saved, way, device)
            expected = truth[way]
            if expected == "refused" or (mode == "watch" and way in WATCH_MISSES and expected == "wrong"):
                expected = "right"
            if mode == "watch" and way in NOT_COMPARED:
                expected = "wrong"
            if verdict(watched.diagnoses) != expected:
                surprises.append((way, truth[way], [(one.code, one.severity) for one in watched.diagnoses]))
            if not same(came, plain[way]):
                surprises.append((way, "not as without gradsan", came, plain[way]))
            for one in watched.diagnoses:
                if one.severity == "error" and one.tensor is not None and one.tensor.device != device:
                    surprises.append((way, "on another device", one.tensor.device))
    assert surprises == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", SAVED)
def test_healed_it_is_right(saved: str, device: str) -> None:
    right = outcome(saved, None, device)
    refused = {way for way in ON_DEVICES if truth_of(saved, way, device) == "refused"}
    wrong = []
    with gradsan.watch("heal"):
        for way in ON_DEVICES:
            came = outcome(saved, way, device)
            if way not in refused and not same(came, right):
                wrong.append((way, came))
    assert wrong == []
