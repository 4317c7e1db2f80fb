"""Every mutable schema with a Python binding is watched, and what is watched is logged when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch

from cases import each
from gradsan import _torch
from gradsan.record import log, writes
from gradsan.record.patches import Patches

# Bound in Python under the operator's name, yet not something that may be wrapped; each with its reason.
NOT_WRAPPED = {
    "set_data": "reached only as the attribute Tensor.data, which is no method",
}


@pytest.fixture(params=[False, True], ids=["pure", "native"])
def core(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param and not log.native_available():
        pytest.skip("the C extension was not built")
    core = log.make_core(request.param)
    core.active = True
    patches = Patches()
    writes.install(core, patches, writes.plan(core))
    yield core
    patches.undo()


def is_watched(value: Any) -> bool:
    return hasattr(value, "_gradsan_original")


def test_every_mutable_schema_with_a_binding_is_watched(core: Any) -> None:
    missing = []
    for namespace, name, positions, _ in writes.mutable_schemas():
        if namespace != "aten" or name in writes.WRITES_NO_DATA or name in NOT_WRAPPED:
            continue
        if 0 in positions and hasattr(torch.Tensor, name) and not is_watched(getattr(torch.Tensor, name)):
            missing.append(f"Tensor.{name}")
        original = _torch.variable_function(name)
        for space in _torch.function_namespaces():
            value = vars(space).get(name)
            is_binding = callable(value) and (value is original or isinstance(value, BuiltinFunctionType))
            if is_binding and not is_watched(value):
                missing.append(f"{space.__name__}.{name}")
    assert missing == []


def test_operators_called_through_torch_ops_are_watched(core: Any) -> None:
    for owner in (_torch.operator_class(), _torch.operator_packet_class()):
        assert is_watched(owner.__call__)


def test_no_wrapper_is_left_behind() -> None:
    spaces = [torch.Tensor, *_torch.function_namespaces()]
    before = [dict(vars(space)) for space in spaces]
    core, patches = log.make_core(False), Patches()
    writes.install(core, patches, writes.plan(core))
    patches.undo()
    for space, old in zip(spaces, before, strict=True):
        now = dict(vars(space))
        assert now.keys() == old.keys()
        assert [name for name in old if now[name] is not old[name]] == []


INTS = torch.tensor([0, 1])
TRIALS: list[tuple[Any, ...]] = [
    (),
    (2,),
    (0.5,),
    (torch.full((2, 2), 0.5),),
    (torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)),
    (torch.ones(2, 2, dtype=torch.bool), 1.0),
    (torch.ones(2, 2, dtype=torch.bool), torch.ones(4)),
    (0, 1),
    (0,),
    (0, INTS, torch.ones(2, 2)),
    (0, INTS, 1.0),
    (0, torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2)),
    (0, torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2), "sum"),
    (0, INTS, torch.ones(2, 2), "prod"),
    ((INTS, INTS), torch.ones(2)),
    (INTS, torch.ones(2)),
    (2.0, 0, 1.0),
    (torch.ones(2), torch.ones(2)),
    ((4, 1), (1, 1)),
    ((2, 2),),
    (torch.ones(2, 3), torch.ones(3, 2)),
    (torch.ones(1, 2, 3), torch.ones(1, 3, 2)),
    (torch.ones(2, 3), torch.ones(3)),
    (torch.full((2, 2), 3),),
]
SUBJECTS = [
    lambda: torch.full((2, 2), 0.25),
    lambda: torch.ones(2, 2, dtype=torch.long),
    lambda: torch.ones(2, 2, dtype=torch.bool),
    lambda: torch.ones(1, 2, 2),
    lambda: torch.ones(2),
    lambda: torch.ones(2, 1),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.ones(2, 2, dtype=torch.float64),
]
METHODS = sorted({writer.op for writer in writes.tensor_methods()})
# In-place methods that none of the trials above can call on a plain CPU tensor; each is still wrapped (first test).
HARD_TO_CALL = {
    "sparse_resize_": "needs sparse geometry that only keeps its size",
    "sparse_resize_and_clear_": "as sparse_resize_",
    "resize_as_sparse_": "as sparse_resize_",
    "copy_sparse_to_sparse_": "needs two sparse tensors",
    "_philox_normal_": "needs a key tensor that only compiled programs make",
    "_philox_randint_": "as _philox_normal_ (since torch 2.15)",
    "_philox_uniform_": "as _philox_normal_",
    "detach_": "cuts the graph; the counter does not move",
}


@pytest.fixture
def default_core() -> Iterator[Any]:
    """Its wrappers stay for all methods: to put them into torch takes longer than all calls."""
    made, patches = log.make_core(None), Patches()
    made.active = True
    writes.install(made, patches, writes.plan(made))
    yield made
    patches.undo()


@each("method", METHODS)
def test_a_method_that_moves_the_counter_is_logged(default_core: Any, method: str) -> None:
    core = default_core
    called = False
    for make in SUBJECTS:
        for arguments in TRIALS:
            tensor = make()
            before = tensor._version
            logged = core.write_count
            try:
                getattr(tensor, method)(*arguments)
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
                assert core.write_count == logged, "a call that raised wrote nothing"
                continue
            if tensor._version == before:
                continue
            called = True
            entry = core.writes()[-1]
            assert entry[1] == _torch.storage_identity(tensor)
            assert entry[2] == tensor._version
            break
        if called:
            break
    assert called or method in HARD_TO_CALL, f"no trial could call {method}"
