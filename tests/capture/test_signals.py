"""Exceptions that handlers of signals raise while gradsan works: they are the program's."""

import functools
import signal

import pytest
import torch
from core_kit import CORES

from gradsan import _torch
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


def arrive_within_a_block(*_):
    """As between two lines of a context manager: modes are changed, and nobody puts them back."""
    _torch.hush()
    torch._C._set_grad_enabled(False)
    arrive()


def modes():
    return str(torch._C._get_torch_function_state()), torch.is_grad_enabled()


def test_the_c_core_puts_modes_back(limited):
    if not log.native_available():
        pytest.skip("the C core was not built for this Python")
    core = log.make_core(True)
    core.active = True
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    calls = {
        "before_write": lambda: core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)(torch.zeros(2), 1),
        "on_result": lambda: core.writer(torch.exp, "exp", "plain", -1, None)(torch.zeros(2)),
        "on_step_begin": lambda: core.step_begin(optimizer),
        "on_enter": lambda: core.engine(lambda *_: None)((torch.zeros(()),)),
    }
    before = modes()
    for listener, call in calls.items():
        setattr(core, listener, arrive_within_a_block)
        with pytest.raises(TimeLimitError):
            call()
        assert modes() == before, listener
        setattr(core, listener, None)


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
    guard, before = Guard(), modes()
    guard.run(fail)
    assert len(guard.blind_spots) == 1
    for run in (guard.run, guard.run_hushed):
        with pytest.raises(TimeLimitError):
            run(arrive_within_a_block)
        assert modes() == before
    assert len(guard.blind_spots) == 1
