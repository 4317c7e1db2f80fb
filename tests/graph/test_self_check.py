"""The check that this torch can be watched: it leaves the program alone, and its failures are reported."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradsan
from gradsan import _session, _torch
from gradsan._torch import hooks
from gradsan.cli import _main
from gradsan.graph import self_check
from gradsan.launch.watcher import Watcher
from gradsan.model import Program
from gradsan.record.recorder import Recorder


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was seen")


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        raise AssertionError(f"{operator} was seen")


def keys(problems) -> list[str]:
    return [problem.key for problem in problems]


def test_this_torch_passes():
    assert self_check.before_watching() == []


def test_nothing_of_the_program_takes_part():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with Functions(), Operators(), torch.inference_mode():
        assert self_check.before_watching() == []
        assert torch.is_inference_mode_enabled()
    assert torch.equal(state, torch.get_rng_state())
    assert threads == torch.get_num_threads()


def test_it_waits_where_hooks_or_transforms_are_entered():
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: 1 / 0, lambda packed: packed):
        assert self_check.before_watching() is None
    found = []
    torch.func.grad(lambda x: found.append(self_check.before_watching()) or x)(torch.ones(()))
    assert found == [None]


@pytest.mark.parametrize("told", [True, False])
def test_hooks_can_be_entered_after_gradsan_has_looked_for_them(monkeypatch, told):
    if not told:  # as before 2.7
        monkeypatch.setattr(hooks, "_top_hooks", None)
    entered = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed)
    for _ in range(2):
        assert not _torch.has_hooks()
        with entered:
            assert _torch.has_hooks()
            with entered:
                assert _torch.has_hooks()


def break_numbers(monkeypatch):
    monkeypatch.setattr(_torch, "sequence_number", lambda: 0)


def break_slots(monkeypatch):
    monkeypatch.setattr(_torch, "refused_tensor", lambda *_: None)


def break_all(monkeypatch):
    monkeypatch.delattr(_torch, "saved_slots")


BROKEN = [(break_numbers, "numbers"), (break_slots, "stale"), (break_all, "failed")]


@pytest.mark.parametrize(("broken", "what"), BROKEN)
def test_a_failure_is_a_blind_spot_of_every_stretch(monkeypatch, broken, what):
    recorder = Recorder()
    with monkeypatch.context() as patch:
        broken(patch)
        recorder.stop(recorder.start())
    for _ in range(2):
        assert f"blind.self_check_{what}" in keys(recorder.evidence().seen.blind_spots)
        recorder.stop(recorder.start())


def test_a_failure_is_said_by_every_way_in(monkeypatch, capsys):
    recorder = Recorder()
    monkeypatch.setattr("gradsan.record.recorder.recorder", lambda native=None: recorder)
    with monkeypatch.context() as patch:
        break_slots(patch)
        with pytest.warns(RuntimeWarning, match="does not let gradsan find"), gradsan.watch():
            pass
    watcher = Watcher(gradsan._session.Session)
    watcher.start()
    watcher.stop()
    assert keys(watcher.problems) == ["blind.self_check_stale"]
    assert _main.show(None) == 1
    assert "does not let gradsan find" in capsys.readouterr().out


def test_verbose_version_of_this_torch(capsys):
    assert _main.show(None) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    assert "can be watched" in said


def test_an_older_torch_runs_plain_and_that_is_said(monkeypatch):
    monkeypatch.setattr(_session, "OLDEST_TORCH", (99, 0))
    before = torch.Tensor.add_
    with pytest.warns(RuntimeWarning, match=r"older than 99\.0") as caught, gradsan.watch() as watched:
        assert torch.Tensor.add_ is before
    assert len(caught) == 1
    assert keys(watched.report.seen.blind_spots) == ["blind.torch_too_old"]
    watcher = Watcher(gradsan._session.Session)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watcher.start()
        watcher.examine(ValueError())
        watcher.stop()
    assert keys(watcher.problems) == keys(watcher.report(Program()).seen.blind_spots) == ["blind.torch_too_old"]
