"""Handlers of signals, and collections of garbage, while gradsan works: they wait, and what they raise passes."""

import functools
import gc
import signal
import sys

import pytest
import torch

from core_kit import CORES
from gradsan import _torch
from gradsan.record import log
from gradsan.record.guarding import Guard, before_node


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


def fail_within_a_block(*_):
    """As between two lines of a context manager: modes are changed, and nobody puts them back."""
    _torch.hush()
    torch._C._set_grad_enabled(False)
    signal.getsignal(signal.SIGUSR1)(signal.SIGUSR1, None)


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
        setattr(core, listener, fail_within_a_block)
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
    core.before_write = lambda *_: signal.getsignal(signal.SIGUSR1)(signal.SIGUSR1, None)
    with pytest.raises(TimeLimitError):
        add(target, 1)
    assert target.tolist() == [1, 1]


@pytest.fixture
def heard():
    """What a handler and a finaliser find: the function that was interrupted, and the modes there."""
    told = []

    def handler(_, frame):
        told.append((frame.f_code.co_name, modes()))

    before = signal.signal(signal.SIGUSR1, handler)
    yield told
    signal.signal(signal.SIGUSR1, before)


class Garbage:
    def __init__(self, told):
        self.told, self.itself = told, self

    def __del__(self):
        self.told.append(("collected", modes()))


def makes_garbage(told):
    """So much that a collection is due, twice."""
    told.clear()
    Garbage(told)
    return [[] for _ in range(2 * gc.get_threshold()[0])]


@pytest.mark.skipif(
    not log.native_available() or sys.version_info >= (3, 14), reason="the interpreter keeps no signals until then"
)
def test_a_handler_waits_until_gradsan_has_worked(heard):
    """It runs in the program's code, under the program's modes, and so do finalisers."""
    core = log.make_core(True)
    core.active = True
    free = modes()
    during = []

    def works(*_):
        before = _torch.hush()
        with torch.no_grad():
            arrive()
            for _ in range(100):
                len(heard)
            during.extend(heard)
            makes_garbage(during)
        _torch.unhush(before)

    target = torch.zeros(2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    leaf = torch.ones((), requires_grad=True)
    loss = leaf * 2
    before_node(loss.grad_fn, works)

    def program(call):
        call()

    calls = {
        "before_write": lambda: core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)(target, 1),
        "on_result": lambda: core.writer(torch.exp, "exp", "plain", -1, None)(target),
        "on_step_begin": lambda: core.step_begin(optimizer),
        "a hook of a Node": lambda: torch.autograd.grad(loss, leaf),
    }
    for listener, call in calls.items():
        heard.clear()
        during.clear()
        if hasattr(core, listener):
            setattr(core, listener, works)
        program(call)
        if hasattr(core, listener):
            setattr(core, listener, None)
        assert during == [], listener
        assert [modes for _, modes in heard] == [free], listener
        assert heard[0][0] in ("<lambda>", "program", "_engine_run_backward"), listener


def test_a_guard_lets_them_pass(limited):
    guard, before = Guard(), modes()
    guard.run(fail)
    assert len(guard.blind_spots) == 1
    for run in (guard.run, guard.run_hushed):
        with pytest.raises(TimeLimitError):
            run(fail_within_a_block)
        assert modes() == before
    assert len(guard.blind_spots) == 1
