"""Exceptions that handlers of signals raise while gradsan works: they are the program's."""

import functools
import signal

import pytest
import torch
from core_kit import CORES

from gradsan.record import log
from gradsan.record.guarding import Guard


class TimeLimitError(Exception):
    """A time limit of the program's."""


def stop(number, frame):
    raise TimeLimitError


class Handler:
    def __call__(self, number, frame):
        raise TimeLimitError

    def method(self, number, frame):
        raise TimeLimitError


@pytest.fixture(params=[stop, Handler(), Handler().method, functools.partial(stop)], ids=lambda one: type(one).__name__)
def limited(request):
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


def arrive(*_):
    signal.raise_signal(signal.SIGUSR1)


def fail(*_):
    raise KeyError("gradsan's own")


@pytest.mark.parametrize("native", CORES)
def test_a_core_lets_them_pass(limited, native):
    core = log.make_core(native)
    core.active = True
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    target = torch.zeros(2)
    core.before_write = fail
    add(target, 1)
    assert (core.log_errors, target.tolist()) == (1, [1, 1])
    core.before_write = arrive
    with pytest.raises(TimeLimitError):
        add(target, 1)
    assert target.tolist() == [1, 1]


def test_a_guard_lets_them_pass(limited):
    guard = Guard()
    guard.run(fail)
    assert len(guard.blind_spots) == 1
    with pytest.raises(TimeLimitError):
        guard.run(arrive)
    assert len(guard.blind_spots) == 1
