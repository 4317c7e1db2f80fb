"""For every operation: what was saved is overwritten, backward fails, and the autopsy names Node, slot and lines."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from autopsy_kit import VERSION_ERROR, failing_node, fails, nodes_behind, only_conflict, overwrite, passes, recording

import core_kit
from cases import each
from gradsan import _torch

SEEDED = 3
DIAGNOSE = Path(__file__).resolve().parents[1] / "diagnose"


def load() -> dict[str, Callable[[], Any]]:
    cases = runpy.run_path(str(DIAGNOSE / "formula_cases.py"))["CASES"]
    return {
        **{name: case.run for name, case in cases.items()},
        **runpy.run_path(str(DIAGNOSE / "test_needs.py"))["OPS"],
    }


NAMES = list(load())
# Overwriting a view of several also makes the gradient of the split itself fail, with another error.
MADE_BY_INDEXING = {f"{name}Backward0" for name in ("Alias", "Index", "Select", "Slice", "Unsqueeze")}
ANOTHER_ERROR = {"MultiheadAttention": "is a view and its base or another view of its base has been modified"}


@functools.cache
def programs(native: bool) -> dict[str, Callable[[], Any]]:
    """The programs by name, loaded while gradsan is on: they keep references to torch's functions."""
    with recording(native):
        return load()


@pytest.fixture(scope="module", params=core_kit.CORES)
def native(request):
    """Both cores, switched on once: every test's own start only counts."""
    with recording(request.param):
        yield request.param


def floating(outputs: Any) -> list[Any]:
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    return [one for one in tensors if torch.is_tensor(one) and one.grad_fn is not None]


def run(program: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(SEEDED)
    return floating(program())  # saved


def start_backward(outputs: list[Any]) -> None:
    grads = [torch.ones_like(one) for one in outputs]
    torch.autograd.backward(outputs, grads)  # used


def saved(nodes: list[Any]) -> list[tuple[int, str, Any]]:
    """(position of the Node, slot, tensor) of every saved tensor that can be overwritten as a user can."""
    found = []
    for position, node in enumerate(nodes):
        for slot, raw in _torch.saved_slots(node):
            tensor = _torch.packed_object(raw)
            if torch.is_tensor(tensor) and tensor.numel() and tensor.layout is torch.strided:
                found.append((position, slot, tensor))
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The places in its memory of all bytes of a tensor."""
    size = tensor.element_size()
    places = torch.arange(tensor.untyped_storage().nbytes() // size) * size
    starts = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return (starts.flatten().unsqueeze(1) + torch.arange(size)).flatten()


def meets(slots: list[tuple[int, str, Any]], position: int, victim: torch.Tensor) -> bool:
    """Whether the Node at a position has saved a byte of ``victim``."""
    memory = victim.untyped_storage()
    touched = torch.zeros(memory.nbytes(), dtype=torch.bool)
    touched[bytes_of(victim)] = True
    return any(
        bool(touched[bytes_of(one)].any())
        for at, _, one in slots
        if at == position and one.untyped_storage()._cdata == memory._cdata
    )


def check(name: str, which: int, native: bool) -> None:
    program = programs(native)[name]
    twins = run(program)
    twin_nodes = nodes_behind(*twins)
    overwrite(saved(twin_nodes)[which][2])
    truth = failing_node(lambda: start_backward(twins), twin_nodes)
    with recording(native) as recorder:
        outputs = run(program)
        nodes = nodes_behind(*outputs)
        slots = saved(nodes)
        victim = slots[which][2]
        overwrite(victim)
        said = fails(lambda: start_backward(outputs))
    if not said.startswith(VERSION_ERROR):
        assert ANOTHER_ERROR[name] in said
        assert recorder.conflicts == []
        return
    conflict = only_conflict(recorder)
    if not meets(slots, truth, victim):
        # PyTorch stops at a slice that has not changed itself; told is one that has.
        [truth] = [position for position, one in enumerate(nodes) if one._sequence_nr() == conflict.save.sequence]
        assert meets(slots, truth, victim)
    at = f"{twin_nodes[truth].name()} after {slots[which][:2]}"
    assert conflict.save.node == twin_nodes[truth].name(), at
    assert conflict.save.sequence == nodes[truth]._sequence_nr(), at
    memory = victim.untyped_storage()._cdata
    stale = {slot for position, slot, one in slots if position == truth and one.untyped_storage()._cdata == memory}
    assert conflict.save.slot in stale, at
    if native or conflict.save.node not in MADE_BY_INDEXING:
        assert passes(conflict.save.site, run, "saved"), at
    else:  # the pure core does not log indexing
        assert conflict.save.site.frames == (), at
    [write] = conflict.writes
    assert write.op == "zero_"
    assert passes(write.site, overwrite, "written")
    assert passes(conflict.use.site, start_backward, "used")
    assert conflict.unexplained == 0
    assert conflict.save.tensor.shape == tuple(victim.shape)


@each("name", NAMES)
def test_slots_of_every_operation(native: bool, name: str, pytestconfig: pytest.Config) -> None:
    """Every slot with ``--long``, else the first or the last of a sample of the programs, smaller on the pure core."""
    number, is_long = NAMES.index(name), pytestconfig.getoption("--long")
    if not is_long and number % (3 if native else 9):
        return
    nodes = nodes_behind(*run(programs(native)[name]))
    if any(node.name() == "NotImplemented" for node in nodes):
        pytest.skip("this torch has no derivative of it")  # aminmax on 2.6
    count = len(saved(nodes))
    assert count
    chosen = range(count) if is_long else [0 if number % 2 else count - 1]
    for which in chosen:
        check(name, which, native)


def beside(both: bool) -> Any:
    """A loss on a saved part whose neighbour was written; of ``both``, on the neighbour's old content, too."""
    rows, w = torch.ones(2, 3), torch.ones(3, requires_grad=True)
    loss = (w * rows[0]).sum() if both else w.sum()
    overwrite(rows[0])
    loss = loss + (w * rows[1]).sum()
    overwrite(rows[0])
    return loss


def test_a_value_that_has_changed_is_reported_before_one_whose_neighbour_has(native):
    with recording(native) as recorder:
        with pytest.raises(RuntimeError, match=VERSION_ERROR):
            beside(both=True).backward()
        (found,) = recorder.conflicts
        assert found.save.tensor.region.offset == 0, "PyTorch stops at the other row, of which no number has changed"
        assert found.save.version == 0


def test_a_false_alarm_alone_stays_one(native):
    with recording(native) as recorder:
        with pytest.raises(RuntimeError, match=VERSION_ERROR):
            beside(both=False).backward()
        (found,) = recorder.conflicts
        assert found.save.tensor.region.offset == 3
