"""Graphs that deep mode walks before a backward: those of which a saved value may have changed."""

import gc

import pytest
import torch

import gradsan
from cases import each
from forked import call_forked
from gradsan.originals.comparing import Comparing, LiveValues, saved_values
from gradsan.originals.originals import Kept, KnownOutside
from gradsan.record import log
from gradsan.record.recorder import recorder


def kept(tensor):
    return Kept(tensor, False, 0, None, 0)


def are_as_saved(live):
    core = log.make_core(False)
    return Comparing(core, KnownOutside(core)).are_as_saved(live, is_part=False)


@pytest.fixture(params=[True, False], ids=["native", "pure"])
def values(request):
    if request.param and not log.native_available():
        pytest.skip("the C core was not built")
    core = log.make_core(request.param)
    return saved_values(core, None, None, (), ())


def values_of(count, values):
    live = LiveValues(values)
    live.walked(count, is_part=False)
    all_kept = [kept(torch.ones(3)) for _ in range(count)]
    for one in all_kept:
        values.add(one)
    return live, all_kept


def test_without_a_change_nothing_need_be_walked(values):
    live, _held = values_of(10, values)
    assert are_as_saved(live)
    assert values.doubtful() == [], "of 256 in doubt the graph would be walked"


def test_moved_storages_are_not_compared_with_their_old_memory(values):
    both = torch.ones(2, 3)
    one = kept(both[0])
    values.add(one)
    both.data[1].add_(1)
    _left, one.original = one.original, torch.zeros(2, 3)[0]
    assert values.doubtful() == [one]


@each("write", [lambda one: one.add_(1), lambda one: one.data.add_(1), lambda one: one.numpy().fill(2)])
def test_a_change_of_any_value_that_lives_is_seen(write, values):
    live, held = values_of(10, values)
    tensor = torch.ones(3)
    held.append(kept(tensor))
    values.add(held[-1])
    write(tensor)
    assert not are_as_saved(live)
    held.pop()
    assert are_as_saved(live)


def test_writes_to_other_elements_of_a_storage_change_nothing(values):
    live, held = values_of(10, values)
    both = torch.ones(2, 3)
    held.append(kept(both[0]))
    values.add(held[-1])
    both.data[1].add_(1)
    assert are_as_saved(live)


def test_now_and_then_the_graph_is_walked_all_the_same(values):
    live, _held = values_of(10, values)
    assert [are_as_saved(live) for _ in range(40)].index(False) == 32


def test_of_many_other_graphs_the_values_are_not_all_looked_at(values):
    live, held = values_of(600, values)
    live.walked(3, is_part=False)
    assert not are_as_saved(live)
    assert live.may_lie_in({0}, is_part=False)
    held.clear()
    assert are_as_saved(live)
    assert not live.may_lie_in({0}, is_part=False)


def test_values_in_written_storages_are_known(values):
    live, held = values_of(10, values)
    written = held[3].alias.untyped_storage()._cdata
    assert live.may_lie_in({0, written}, is_part=False)
    assert not live.may_lie_in({0}, is_part=False)
    assert not live.may_lie_in((), is_part=False)


def test_dead_values_are_forgotten(values):
    for _ in range(30_000):
        values.add(kept(torch.ones(1)))
    assert values.count <= 10_001
    assert not values.live()


def values_reached_by_walks():
    """The number of kept values that each walk of a training of 60 rounds reached."""
    live, walked = recorder().watching.deep.live, []
    live.walked = lambda *reached: walked.append(reached[0]) or LiveValues.walked(live, *reached)
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with gradsan.watch("deep") as watched:
        for _ in range(60):
            optimizer.zero_grad()
            layer(torch.ones(2, 3)).tanh().sum().backward()
            optimizer.step()
    assert not watched.report.diagnoses
    return walked


def test_a_training_walks_few_of_its_graphs():
    # In a process of its own: graphs that other tests have left alive would have to be walked, too.
    assert call_forked(values_reached_by_walks) == [2, 2]


def test_changes_after_many_right_rounds_are_measured():
    weight = torch.ones(3, requires_grad=True)
    graphs = []
    with gradsan.watch("deep") as watched:
        for number in range(20):
            graphs.append(weight.exp().sum())
            factor = weight.detach().exp()
            loss = (weight * factor).sum()
            if number == 18:
                factor.data.mul_(3)
            loss.backward()
    [found] = [one for one in watched.report.diagnoses if one.silent]
    assert abs(found.gradient.relative_error - 2) < 1e-6


def test_of_a_long_graph_the_part_that_leads_to_the_inputs_is_walked(monkeypatch):
    deep, walked = recorder().watching.deep, []
    live = LiveValues(deep._values)
    gc.collect()
    monkeypatch.setattr(deep, "live", live)
    monkeypatch.setattr(live, "walked", lambda *told: walked.append(told) or LiveValues.walked(live, *told))
    weight = torch.ones(3, requires_grad=True)
    with gradsan.watch("deep") as watched:
        for number in range(200):
            factor = torch.full((3,), 0.5)
            loss = (weight.tanh() * factor).sum()
            if number == 190:
                factor.data.mul_(3)
            (step,) = torch.autograd.grad(loss, weight, create_graph=True)
            weight = weight - 0.1 * step
        weight.sum().backward()
    assert max(reached for reached, is_part in walked if is_part) < 10
    assert max(reached for reached, is_part in walked if not is_part) > 500
    found = [one for one in watched.report.diagnoses if one.silent]
    assert abs(found[0].gradient.relative_error - 2) < 1e-6
