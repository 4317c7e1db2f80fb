"""Backward calls while they run, in both cores."""

import gc
import inspect
import sys
import threading
import traceback

import pytest
import torch

from core_kit import constants
from gradsan import _torch


@pytest.fixture
def engine(core, monkeypatch):
    """A core that sees every backward."""
    for namespace, name in _torch.engine_entry_points():
        monkeypatch.setattr(namespace, name, core.engine(getattr(namespace, name)))
    core.active = True
    yield core
    core.active = False


@pytest.fixture
def leaf():
    return torch.ones(2, requires_grad=True)


def fail(leaf):
    """A backward that PyTorch's version check stops."""
    value = leaf.exp()
    with torch.no_grad():
        value.add_(1)
    value.sum().backward()


def test_a_backward_is_known_while_it_runs(engine, leaf):
    seen = []
    leaf.register_hook(lambda gradient: seen.append(list(engine.running)))
    loss = leaf.sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, [leaf])
    assert engine.running == []
    assert engine.backwards == 2
    ((backward,), (grad,)) = seen
    clock, stack, thread, outputs, retain, accumulate = backward
    assert (clock, thread, retain, accumulate) == (1, threading.get_ident(), True, True)
    assert outputs == (loss,)
    assert sys._getframe().f_code in stack.codes
    assert (grad[0], grad[4], grad[5]) == (2, False, False)
    assert engine.log_errors == 0


def test_both_cores_keep_the_same_record(both):
    seen = []

    def entered(core):
        def original(outputs, *rest, **named):
            seen.append(core.running[0])
            return rest, named

        core.active = True
        return core.engine(original)

    for core in both:
        run = entered(core)
        assert run((1,), 2) == ((2,), {})
        named = {"accumulate_grad": "no", "other": 5}
        assert run((1,), 2, "retain", 4, **named) == ((2, "retain", 4), named)
    half = len(seen) // 2
    without_stack = [(*entry[:1], *entry[2:]) for entry in seen]
    assert without_stack[:half] == without_stack[half:]
    assert [entry[4:] for entry in seen[:half]] == [(None, True), ("retain", "no")]
    assert [[type(field) for field in entry if not hasattr(field, "codes")] for entry in seen[:half]] == [
        [type(field) for field in entry if not hasattr(field, "codes")] for entry in seen[half:]
    ]


def test_nothing_is_kept_while_inactive(engine, leaf):
    engine.active = False
    seen = []
    leaf.register_hook(lambda gradient: seen.append(list(engine.running)))
    leaf.sum().backward()
    assert seen == [[]]
    assert (engine.backwards, engine.clock) == (0, 0)


def test_a_failure_is_shown_with_its_record(engine, leaf):
    told = []

    def on_failure(record, error):
        told.append((record, error, list(engine.running), error.__traceback__, sys.exc_info()[1]))

    engine.on_failure = on_failure
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        fail(leaf)
    ((record, error, running, seen_traceback, _),) = told
    assert error is caught.value
    assert running == [record]
    assert record[3][0].grad_fn is not None
    assert engine.running == []
    assert seen_traceback is not None
    assert any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in traceback.walk_tb(seen_traceback))


def test_the_program_s_exception_stays_as_it_is(engine, leaf):
    def failure():
        with pytest.raises(RuntimeError) as caught:
            fail(leaf)
        return caught.value

    engine.active = False
    plain = failure()
    engine.active = True
    for on_failure in (None, lambda record, error: None, lambda record, error: 1 / 0):
        engine.on_failure = on_failure
        error = failure()
        assert (type(error), str(error)) == (type(plain), str(plain))
        assert error.__cause__ is error.__context__ is None
        if engine.is_native:
            assert files(error) == files(plain)
            assert not any("record/_" in file for file in files(error))
    assert engine.log_errors == 1


def files(error):
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]


def test_a_program_s_own_exception_passes(engine, leaf):
    class Mine(Exception):
        pass

    def refuse(gradient):
        raise Mine("from a hook")

    told = []
    engine.on_failure = lambda record, error: told.append(error)
    leaf.register_hook(refuse)
    with pytest.raises(Mine) as caught:
        leaf.sum().backward()
    assert told == [caught.value]
    assert engine.running == []


def test_failures_in_on_failure_are_counted(engine, leaf):
    engine.on_failure = lambda record, error: 1 / 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fail(leaf)
    assert engine.log_errors == 1


def test_an_interrupt_in_on_failure_is_not_swallowed(engine, leaf):
    def interrupt(record, error):
        raise KeyboardInterrupt

    engine.on_failure = interrupt
    with pytest.raises(KeyboardInterrupt) as caught:
        fail(leaf)
    assert "modified by an inplace operation" in str(caught.value.__context__)
    assert engine.log_errors == 0
    assert engine.running == []


def test_on_failure_may_change_itself(engine, leaf):
    def once(record, error):
        engine.on_failure = None

    engine.on_failure = once
    del once
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fail(leaf)
    assert engine.log_errors == 0


def test_a_backward_within_a_backward(engine, leaf):
    depths = []
    other = torch.ones(1, requires_grad=True)
    other.register_hook(lambda gradient: depths.append(len(engine.running)))

    def nested(gradient):
        depths.append(len(engine.running))
        with torch.enable_grad():
            (other * 2).sum().backward()
        depths.append(len(engine.running))

    leaf.register_hook(nested)
    leaf.sum().backward()
    assert depths == [1, 2, 1]
    assert engine.running == []


def test_a_failure_within_a_backward_leaves_the_outer_one_running(engine, leaf):
    seen, told = [], []
    engine.on_failure = lambda record, error: told.append(record)

    def nested(gradient):
        with torch.enable_grad(), pytest.raises(RuntimeError, match="inplace"):
            fail(torch.ones(1, requires_grad=True))
        seen.append(list(engine.running))

    leaf.register_hook(nested)
    leaf.sum().backward()
    assert [len(running) for running in seen] == [1]
    assert len(told) == 1
    assert told[0] not in seen[0]


def test_backwards_of_many_threads(engine):
    barrier = threading.Barrier(4)
    seen, failures = {}, []

    def work():
        try:
            leaf = torch.ones(2, requires_grad=True)

            def hook(gradient):
                barrier.wait(30)
                seen[threading.get_ident()] = {entry[2] for entry in engine.running}
                barrier.wait(30)

            leaf.register_hook(hook)
            leaf.sum().backward()
            for _ in range(100):
                torch.ones(2, requires_grad=True).sum().backward()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(seen) == 4
    assert all(found == set(seen) for found in seen.values())
    assert engine.running == []


def test_nodes_of_a_differentiable_backward_are_logged(engine, leaf):
    (gradient,) = torch.autograd.grad((leaf**3).sum(), [leaf], create_graph=True)
    ((first, end, _, stack),) = engine.nodes_near(gradient.grad_fn._sequence_nr(), threading.get_ident())
    assert end - first > 1
    assert sys._getframe().f_code in stack.codes
    assert engine.saves == 1
    leaf.sum().backward()
    assert engine.saves == 1


def test_a_wrong_call_is_the_original_s_to_refuse(core):
    core.active = True

    def original(outputs, more):
        return outputs

    wrapped = core.engine(original)
    for wrong in (lambda: wrapped(), lambda: wrapped(1), lambda: wrapped(1, 2, 3)):
        with pytest.raises(TypeError):
            wrong()
    assert core.running == []


def test_the_wrapper_looks_like_what_it_wraps(core):
    def original(t_outputs, *args, **kwargs):
        """What it does."""

    wrapped = core.engine(original)
    assert (wrapped.__name__, wrapped.__doc__, wrapped._gradsan_original) == ("original", "What it does.", original)
    assert inspect.signature(wrapped) == inspect.signature(original)


def test_is_called_before_and_after(core):
    core.active = True
    told = []
    core.on_enter = lambda record, args, kwargs: told.append(("enter", record, args, kwargs))
    core.on_leave = lambda record: told.append(("leave", record))
    outputs = (object(),)
    run = core.engine(lambda t_outputs, *args, **kwargs: told.append("engine") or 7)
    assert run(outputs, "grads", True, accumulate_grad=False) == 7
    (_, entered, args, kwargs), middle, (_, left) = told
    assert middle == "engine"
    assert entered is left
    assert entered[3] is outputs
    assert args == ("grads", True)
    assert kwargs == {"accumulate_grad": False}


def test_a_loss_that_is_not_finite_is_reported_before(core):
    core.active = True
    told = []
    core.on_nonfinite = lambda record: told.append(record[3][0])
    run = core.engine(lambda *_: None)
    bad = [torch.tensor(float("nan")), torch.tensor([1.0, float("-inf")]), torch.tensor(complex(0, float("inf")))]
    unsure = [torch.ones(2, 3).t(), torch.ones(5_000)]
    fine = [torch.tensor(1.0), torch.ones(3), torch.tensor([2.0, float("nan")])[0], torch.tensor(7)]
    unasked = [torch.tensor(float("nan"), device="meta"), object()]
    for one in bad + unsure + fine + unasked:
        run((one,))
    seen = bad + unsure if core.is_native else bad + unsure + fine + unasked
    assert [id(one) for one in told] == [id(one) for one in seen]


@pytest.mark.parametrize("moment", ["on_enter", "on_leave", "on_differentiable"])
def test_may_be_stopped_before_and_after(core, moment):
    core.active = True

    def stop(*_):
        raise KeyError("stop")

    setattr(core, moment, stop)
    ran = []
    run = core.engine(lambda t_outputs, *_: ran.append(t_outputs))
    with pytest.raises(KeyError, match="stop"):
        run((), None, True, True)
    assert bool(ran) == (moment != "on_enter")
    assert core.running == []


def test_calls_back_with_the_gradients_that_can_be_differentiated(core):
    core.active = True
    told = []
    core.on_differentiable = lambda *given: told.append(given)
    inputs, outputs = (object(),), (object(),)
    run = core.engine(lambda t_outputs, *args, **kwargs: 7)
    run(outputs, None, True, False, inputs, accumulate_grad=False)
    run(outputs)
    assert told == []
    run(outputs, None, True, True, inputs, accumulate_grad=False)
    run(outputs, None, True, True)
    (record, given, result), (_, none, _) = told
    assert record[3] is outputs
    assert given is inputs
    assert (none, result) == ((), 7)


def test_calls_back_for_gradients_that_fill_no_grad_and_have_no_graph(core):
    core.active = True
    told = []
    core.on_gradients = lambda *given: told.append(given)
    inputs, outputs = (object(),), (object(),)
    run = core.engine(lambda t_outputs, *args, **kwargs: 7)
    run(outputs)
    run(outputs, None, True, True, inputs, accumulate_grad=False)
    assert told == []
    run(outputs, None, True, False, inputs, accumulate_grad=False)
    [(record, given, result)] = told
    assert (record[3], given, result) == (outputs, inputs, 7)


def test_calls_back_for_nodes(core):
    core.active = True
    told = []
    core.on_nodes = lambda holder, first, end: told.append((holder, first, end))
    x = torch.ones(3, requires_grad=True)
    multiply = core.writer(torch.mul, "mul", "plain", -1, None)
    y = multiply(x, 2)
    [(holder, first, end)] = told
    assert holder is y
    assert first <= y.grad_fn._sequence_nr() < end
    core.writer(torch.add, "add", "plain", -1, None)(torch.ones(1), 1)
    assert len(told) == 1


def test_calls_back_for_writes_while_a_backward_runs(core):
    core.active = True
    told = []
    core.on_write = lambda *what: told.append(what)
    x = torch.ones(2)
    write = core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)
    write(x, 2)
    assert told == []
    core.engine(lambda t_outputs: write(x, 2))(())
    [(tensor, op, stack)] = told
    assert tensor is x
    assert op == "mul_"
    assert stack is core.writes()[-1][10]
    core.on_write = None
    core.engine(lambda t_outputs: write(x, 2))(())
    assert len(told) == 1


def test_failures_of_callbacks_do_not_reach_the_program(core):
    core.active = True

    def stop(*_):
        raise KeyError("stop")

    core.on_write = stop
    x = torch.ones(2)
    write = core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)
    core.engine(lambda t_outputs: write(x, 2))(())
    assert x.tolist() == [2, 2]
    assert core.log_errors == 1


def test_the_end_of_the_last_backward_is_known(core):
    core.active = True
    assert core.backward_end == 0
    x = torch.ones(2, requires_grad=True)
    core.engine(lambda t_outputs: x.exp())(())
    ended = core.backward_end
    assert ended == torch.ones(2, requires_grad=True).exp().grad_fn._sequence_nr()
    x.exp()
    assert core.backward_end == ended

    def fail(t_outputs):
        raise KeyError

    with pytest.raises(KeyError):
        core.engine(fail)(())
    assert core.backward_end == ended


def test_every_call_is_remembered(core):
    core.active = True
    core.steps = 3
    x = torch.ones(2, requires_grad=True)
    loss = (x * 2).sum()

    def original(t_outputs, *args, **kwargs):
        x.exp()
        return 7

    run = core.engine(original)
    before = torch._C._autograd._get_sequence_nr()
    assert run((loss, object()), None, True, accumulate_grad=False) == 7
    [(clock, stack, thread, retain, accumulate, begun, ended, steps, life, (weak, none))] = core.backward_log
    assert clock == core.clock - 1  # the Nodes made within are one event more
    assert stack.codes[0] is sys._getframe().f_code
    assert (thread, retain, accumulate, steps) == (threading.get_ident(), True, False, 3)
    assert (begun, ended) == (before, before + 1)
    assert weak() is loss
    assert none is None
    run((loss,))
    assert core.backward_log[1][8] == life
    other = threading.Thread(target=run, args=((loss,),))
    other.start()
    other.join()
    assert core.backward_log[2][8] != life


def test_a_call_that_raised_ends_where_it_began(core):
    core.active = True

    def original(t_outputs):
        torch.ones(2, requires_grad=True).exp()
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        core.engine(original)(())
    [entry] = core.backward_log
    assert entry[5] == entry[6]


def test_outputs_that_fail_to_be_read_are_counted(core):
    core.active = True
    assert core.engine(lambda t_outputs: 7)(3) == 7
    assert (core.log_errors, core.backward_log) == (1, [])


def test_the_logs_keep_the_youngest(core):
    core.active = True
    run, optimizer = core.engine(lambda t_outputs: None), torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    kept = constants(core).BACKWARDS_KEPT, constants(core).STEPS_KEPT
    for _ in range(kept[0] + 3):
        run(())
    for _ in range(kept[1] // 2 + 3):
        core.step_begin(optimizer, (), {})
        core.step_end(optimizer, (), {})
    assert [entry[0] for entry in core.backward_log] == list(range(4, kept[0] + 4))
    assert (len(core.step_log), core.step_log[0][0], core.step_log[-1][1]) == (kept[1], "begin", core.clock)
    core.clear()
    assert core.step_log == core.backward_log == []


def test_calls_back_for_rounds_of_one_line(core):
    core.active = True
    told = []
    core.on_round = lambda record, rounds: told.append((record[0], rounds))
    run = core.engine(lambda t_outputs: None)
    for _ in range(9):
        run(())
    run(())
    assert [rounds for _, rounds in told] == [1, 2, 4, 8, 1]
    assert [clock for clock, _ in told] == [1, 2, 4, 8, 10]


def test_may_be_stopped_at_a_round(core):
    core.active = True

    def stop(*_):
        raise KeyError("stop")

    core.on_round = stop
    with pytest.raises(KeyError, match="stop"):
        core.engine(lambda t_outputs: None)(())
    assert core.running == []


class Passing(RuntimeError):
    pass


def raises_passing(*_):
    raise Passing


def test_passes_on_all_writes_if_wanted(core):
    core.active = core.tells_all_writes = True
    told = []
    core.on_write = lambda *what: told.append(what[1])
    x = torch.ones(2)
    core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)(x, 2)
    core.log_write(x, "add_", "op", None, core.stack())
    assert told == ["mul_", "add_"]


def test_some_errors_may_pass(core):
    core.active = core.tells_all_writes = True
    core.on_write = raises_passing
    x = torch.ones(2)
    write = core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)
    write(x, 2)
    assert core.log_errors == 1
    core.lets_pass = Passing
    with pytest.raises(Passing):
        write(x, 2)
    assert x.tolist() == [4, 4]
    assert core.log_errors == 1
    core.on_write = None
    core.on_failure = raises_passing
    with pytest.raises(Passing):
        core.engine(stop)(())
    core.lets_pass = None
    with pytest.raises(KeyError):
        core.engine(stop)(())


def stop(_):
    raise KeyError("stop")


def test_no_garbage_is_collected_while_the_frames_of_threads_are_made(monkeypatch):
    """A ``threading.local`` that ends meanwhile waits for a lock that its own thread holds (CPython's issue 106883)."""
    current, collects = sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or current())
    assert threading.get_ident() in _torch.frames_of_threads()
    assert gc.isenabled()
    gc.disable()
    try:
        _torch.frames_of_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert collects == [False, False]
