"""The log of optimizer steps, in both cores."""

import sys
import threading
from array import array
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import gradsan
from core_kit import places
from gradsan.record.patches import Patches
from gradsan.record.steps import Settling, Steps


@pytest.fixture
def stepping(core, monkeypatch):
    """A core that sees every step, and writes by ``add_`` and ``mul_``."""
    handles = register_optimizer_step_pre_hook(core.step_begin), register_optimizer_step_post_hook(core.step_end)
    for name in ("add_", "mul_", "addcmul_", "addcdiv_", "copy_", "lerp_"):
        wrapper = core.writer(getattr(torch.Tensor, name), name, "inplace", 0, None)
        monkeypatch.setattr(torch.Tensor, name, wrapper)
    core.active = True
    yield core
    core.active = False
    for handle in handles:
        handle.remove()


def parameters(*shapes):
    made = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def numbers(data):
    return list(array("q", data))


def storages(tensors):
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def test_a_step_is_two_entries(stepping):
    one, two, three = parameters(2, 3, 4)
    three.grad = None
    optimizer = torch.optim.SGD([{"params": [one, two]}, {"params": [three], "lr": 0.2}], lr=0.1)
    before = torch._C._autograd._get_sequence_nr()
    stepping.steps = 7
    optimizer.step()
    begin, end = stepping.step_log
    assert begin[:5] == ("begin", 1, 7, id(optimizer), "SGD")
    assert sys._getframe().f_code in begin[5].codes
    assert begin[6] == before
    assert numbers(begin[7]) == storages([one, two, three])
    assert numbers(begin[8]) == [0, 0, 0]
    assert end[:3] == ("end", 2, id(optimizer))
    assert numbers(end[3]) == [1, 1, 0]
    assert end[4:] == (before,)
    assert (stepping.open_steps, stepping.steps, stepping.clock, stepping.log_errors) == (0, 8, 2, 0)


def test_both_cores_log_the_same_entries(both):
    made = [*parameters(2, 3), *(torch.nn.Parameter(torch.ones(1)) for _ in range(200))]
    view = torch.ones(4).requires_grad_()
    sparse = torch.nn.Parameter(torch.ones(2, 2).to_sparse())
    double = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([{"params": [*made, view]}, {"params": [sparse, double]}, {"params": []}], lr=0.1)
    for core in both:
        core.step_begin(optimizer, (), {})
    with torch.no_grad():
        made[1].add_(1)
        double.zero_().add_(1)
    for core in both:
        core.step_end(optimizer, (), {})
    logs = [list(core.step_log) for core in both]
    for pure, native in zip(*logs, strict=True):
        assert [type(field) for field in pure if not hasattr(field, "codes")] == [
            type(field) for field in native if not hasattr(field, "codes")
        ]
    begins = [log[0] for log in logs]
    assert begins[0][:5] == begins[1][:5]
    assert begins[0][6:] == begins[1][6:]
    assert places(begins[0][5]) == places(begins[1][5])
    assert logs[0][1] == logs[1][1]
    assert numbers(begins[0][7])[-2:] == [0, double.untyped_storage()._cdata]
    assert numbers(logs[0][1][3])[:3] == [0, 1, 0]
    assert numbers(logs[0][1][3])[-1] == 2


def test_a_parameter_that_got_another_storage_is_seen(stepping):
    one, two, three = parameters(2, 2, 2)
    optimizer = torch.optim.SGD([one, two, three], lr=0.1)
    optimizer.step()
    two.data = torch.zeros(2)
    optimizer.step()
    assert numbers(stepping.step_log[2][7]) == storages([one, two, three])
    assert numbers(stepping.step_log[2][7]) != numbers(stepping.step_log[0][7])


def test_a_step_that_raises_has_no_end(stepping):
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise ValueError("no step today")

    optimizer = Failing(parameters(2), lr=0.1)
    with pytest.raises(ValueError, match="no step today"):
        optimizer.step()
    # torch puts its hooks around the step of each class, so the inherited step within is one of its own.
    assert [entry[0] for entry in stepping.step_log] == ["begin", "begin", "end"]
    optimizer.fails = False
    optimizer.step()
    assert stepping.step_log[-1][:1] == ("end",)
    assert stepping.log_errors == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adadelta, torch.optim.RMSprop])
@pytest.mark.parametrize("foreach", [False, True])
def test_writes_of_torchs_optimizers_are_in_the_step_entries_alone(stepping, kind, foreach):
    made = parameters(2, 3)
    optimizer = kind(made, lr=0.1, foreach=foreach)
    for _ in range(2):
        optimizer.step()
    assert stepping.writes() == []
    assert [entry[0] for entry in stepping.step_log] == ["begin", "end"] * 2
    before, after = numbers(stepping.step_log[0][8]), numbers(stepping.step_log[1][3])
    assert all(later > earlier for earlier, later in zip(before, after, strict=True))


def test_a_closure_runs_within_the_step(stepping):
    (parameter,) = parameters(2)
    buffer, calls = torch.zeros(1), []
    optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=3)

    def closure():
        calls.append(stepping.open_steps)
        buffer.add_(1)
        optimizer.zero_grad()
        loss = ((parameter - 3) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert [entry[0] for entry in stepping.step_log] == ["begin", "end"]
    assert len(calls) > 1
    assert set(calls) == {1}
    # The program's own write is in the log, the optimizer's are not.
    assert [entry[10].codes[0] for entry in stepping.writes()] == [closure.__code__] * len(calls)


class Descent(torch.optim.Optimizer):
    """An optimizer of the program's own."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)


def test_writes_of_the_programs_own_optimizer_are_logged(stepping):
    made = parameters(2, 3)
    Descent(made).step()
    assert [entry[0] for entry in stepping.step_log] == ["begin", "end"]
    assert stepping.step_log[0][4] == "Descent"
    assert [entry[1] for entry in stepping.writes()] == storages(made)
    assert all(entry[13] and not entry[12] for entry in stepping.writes())


def test_a_step_within_a_step(stepping):
    inner = torch.optim.SGD(parameters(2), lr=0.1)
    outer = torch.optim.SGD(parameters(3), lr=0.1)

    def closure():
        with torch.enable_grad():
            inner.step()
        assert stepping.open_steps == 1
        return 0.0

    outer.step(closure)
    assert [(entry[0], entry[3] if entry[0] == "begin" else entry[2]) for entry in stepping.step_log] == [
        ("begin", id(outer)),
        ("begin", id(inner)),
        ("end", id(inner)),
        ("end", id(outer)),
    ]
    assert stepping.open_steps == 0


class Odd:
    """Something with ``param_groups`` that are no lists."""

    def __init__(self, groups):
        self.param_groups = groups


def test_groups_need_not_be_lists(core):
    made = parameters(1, 2, 3)
    core.step_begin(Odd(({"params": iter(made[:2])}, {"params": tuple(made[2:])})), (), {})
    assert numbers(core.step_log[0][7]) == storages(made)
    assert core.log_errors == 0


class Refusing(torch.Tensor):
    """A tensor that has no version, or stops the program when it is asked for it."""

    refusal = ValueError

    @property
    def _version(self):
        raise self.refusal("not today")


@pytest.mark.parametrize("groups", [None, 3, [3], [{}], [{"params": 3}], [{"params": [3]}], [{"params": [Refusing()]}]])
def test_unreadable_parameters_are_counted(core, groups):
    odd = Odd(groups)
    assert core.step_begin(odd, (), {}) is None
    assert core.step_end(odd, (), {}) is None
    assert (core.log_errors, core.open_steps, core.steps, core.clock) == (2, 0, 1, 2)
    assert list(core.step_log) == []


def test_an_interrupt_is_not_swallowed(core):
    class Interrupting(Refusing):
        refusal = KeyboardInterrupt

    for hook in (core.step_begin, core.step_end):
        with pytest.raises(KeyboardInterrupt):
            hook(Odd([{"params": [Interrupting()]}]), (), {})


def test_an_end_without_a_beginning(core):
    core.step_end(Odd([]), (), {})
    assert (core.open_steps, core.steps) == (0, 1)
    assert core.step_log[0][0] == "end"


def step_that_raises():
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(fail)
    return optimizer, parameter


def test_a_step_that_raised_does_not_stay_open(stepping):
    optimizer, parameter = step_that_raises()
    assert stepping.open_steps == 1
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert stepping.open_steps == 0


def test_after_a_step_that_raised_what_optimizers_write_besides_is_logged(stepping):
    step_that_raises()
    names = {}
    exec(compile("def beside(t): t.add_(1)", stepping.optimizer_folder + "made_up.py", "exec"), names)
    engine = stepping.engine(lambda outputs, *args, **kwargs: None)
    logged = len(stepping.writes())
    names["beside"](torch.zeros(1))
    assert len(stepping.writes()) == logged
    engine((torch.zeros(1),))
    assert stepping.open_steps == 0
    names["beside"](torch.zeros(1))
    assert len(stepping.writes()) == logged + 1


def test_a_backward_in_a_closure_leaves_its_step_open_and_one_elsewhere_those_of_other_threads(stepping):
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    engine, seen = stepping.engine(lambda outputs, *args, **kwargs: None), []

    def closure():
        engine((torch.zeros(1),))
        seen.append(stepping.open_steps)
        elsewhere = threading.Thread(target=engine, args=((torch.zeros(1),),))
        elsewhere.start()
        elsewhere.join()
        seen.append(stepping.open_steps)

    optimizer.step(closure)
    assert seen == [1, 1]
    assert stepping.open_steps == 0


@pytest.fixture
def steps(core):
    """The records of the steps that a core sees."""
    records = Steps(core)
    patches = Patches()
    records.install(patches)
    core.active = True
    yield records
    core.active = False
    patches.undo()


def test_a_step_that_raised_is_over(steps):
    (one,) = parameters(2)

    def stop():
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        torch.optim.SGD([one], lr=0.1).step(stop)
    (record,) = steps.steps
    assert (record.end, list(record.after)) == (record.clock, list(record.before))


def test_a_step_runs_until_it_ends(steps):
    (one,) = parameters(2)
    seen = []

    def closure():
        seen.extend(record.end for record in steps.steps)
        other = threading.Thread(target=lambda: seen.extend(record.end for record in steps.steps))
        other.start()
        other.join()
        return one.sum()

    torch.optim.SGD([one], lr=0.1).step(closure)
    assert seen == [None, None]
    assert [record.end is None for record in steps.steps] == [False]


def test_memory_of_a_step_that_raised_may_be_used_again():
    """Its record knows addresses; the values that live there later are not its parameters."""

    def stop():
        raise ValueError("stop")

    with gradsan.watch(), pytest.raises(ValueError, match="stop"):
        torch.optim.SGD(parameters(*[(6,)] * 3000), lr=0.1).step(stop)
    watched = gradsan.watch()
    with watched:
        x = torch.ones(6, requires_grad=True)
        h = x * 2
        left = h[:3].sin().sum()
        h[3:] *= 5
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            (left + h[3:].sum()).backward()
    assert [diagnosis.code for diagnosis in watched.diagnoses] == ["GS120"]


def test_calls_back_for_optimizers_that_are_not_settled(stepping):
    optimizer = torch.optim.SGD(parameters(2), lr=0.1)
    told = []
    stepping.on_step_begin = lambda one: told.append(("begin", one, stepping.open_steps))
    stepping.on_step_end = lambda one: told.append(("end", one, stepping.open_steps))
    optimizer.step()
    assert told == [("begin", optimizer, 1), ("end", optimizer, 0)]
    stepping.settled.add(id(optimizer))
    optimizer.step()
    assert len(told) == 2
    assert len(stepping.step_log) == 4


@pytest.mark.parametrize("moment", ["on_step_begin", "on_step_end"])
def test_may_be_stopped_at_a_step(stepping, moment):
    def stop(_):
        raise KeyError("stop")

    setattr(stepping, moment, stop)
    with pytest.raises(KeyError, match="stop"):
        torch.optim.SGD(parameters(2), lr=0.1).step()


def test_an_optimizer_is_looked_at_once_then_when_it_is_due_and_a_fused_one_at_every_step():
    seen, later, fused = [], [], []
    core = SimpleNamespace(backwards=0, settled=set())
    settling = Settling(
        core,
        lambda optimizer, frame: seen.append((optimizer, frame.f_code)),
        lambda optimizer, _: later.append(optimizer),
        fused.append,
    )

    def step(optimizer, closure=lambda: None):
        settling.before_step(optimizer)
        closure()
        settling.after_step(optimizer)

    def without_gradient():
        [parameter] = parameters(2)
        parameter.grad = None
        return [parameter]

    plain, quick = (torch.optim.SGD(without_gradient(), lr=0.1, fused=kind) for kind in (False, True))
    step(plain)
    assert (seen, core.settled) == ([], set())  # no gradient can be missed yet
    core.backwards = 1
    for optimizer in (plain, quick, plain, quick):
        step(optimizer)
    assert seen == [(plain, step.__code__), (quick, step.__code__)]
    assert fused == [quick, quick]
    assert (later, core.settled) == ([], {id(plain)})
    settling.look_again()
    assert core.settled == set()
    for optimizer in (plain, quick, plain, quick):
        step(optimizer)
    assert (later, core.settled) == ([plain, quick], {id(plain)})
    seen.clear()
    later.clear()
    plain = optimizer = None
    assert core.settled == set()

    complete = torch.optim.SGD(parameters(2), lr=0.1)
    step(complete)
    settling.look_again()
    step(complete)
    assert (seen, later) == ([], [])  # nothing is missing
    computing = torch.optim.SGD(without_gradient(), lr=0.1)

    def closure():
        core.backwards += 1
        computing.param_groups[0]["params"][0].grad = torch.ones(2)

    step(computing, closure)
    assert [one for one, _ in seen] == [computing]  # looked at when its closure has run
    seen.clear()
    clearing = torch.optim.SGD([*without_gradient(), *parameters(2)], lr=0.1)
    step(clearing, clearing.zero_grad)
    assert seen == []  # it takes its gradients away itself: what was missing is not known
