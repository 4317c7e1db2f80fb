"""The log of writes, in both cores."""

import sys
import weakref

import pytest
import torch

from core_kit import constants, install, places, writing_program
from gradsan.record.log import logged_writes


def test_the_writes_of_a_program(patched):
    storage = writing_program()
    log = patched.writes()
    assert patched.log_errors == 0
    assert patched.write_count == len(log)
    assert [(entry[3], entry[4]) for entry in log] == [
        ("add_", "inplace"),
        ("__iadd__", "inplace"),
        ("add_", "inplace"),
        *[("__setitem__", "setitem")] * 6,
        ("zero_", "inplace"),
        ("add", "out"),
        *[("sort", "out")] * 2,
        ("relu_", "inplace"),
        *[("_foreach_add_", "foreach")] * 2,
        ("add_", "inplace"),
        *[("zero_", "inplace")] * 2,
        ("add_", "inplace"),
        ("copy_", "inplace"),
        ("add_", "inplace"),
    ]
    assert all(entry[1] == storage for entry in log[:11])
    assert [entry[2] for entry in log[:4]] == [1, 2, 3, 4]
    assert log[2][5:9] == (3, (3, 3), (3, 1), 4)
    assert [entry[9] for entry in log[3:9]] == [
        (0,),
        (1, ..., None, slice(None, 2)),
        None,
        None,
        None,
        (slice(None, None, 2),),
    ]
    assert log[9][7] == (1, 3)
    assert [number for number, entry in enumerate(log) if entry[13]] == [16]
    assert [number for number, entry in enumerate(log) if not entry[12]] == [16, 19]
    assert log[16][8] == 8
    assert log[18][5:9] == (0, (2, 2), None, 1)
    assert log[19][2] is None
    assert log[20][6] == log[20][7] == ()
    assert all(entry[10].codes[0] is writing_program.__code__ for entry in log)
    assert all(type(entry[6]) is tuple for entry in log)


def test_both_cores_log_the_same_writes(both):
    logs = []
    for core in both:
        with pytest.MonkeyPatch.context() as patch:
            install(core, patch)
            begin = torch._C._autograd._get_sequence_nr()
            writing_program()
            logs.append([comparable(entry, begin) for entry in core.writes()])
            assert core.log_errors == 0
            core.active = False
    assert logs[0] == logs[1]
    assert len(logs[0]) == 22


def comparable(entry, begin):
    """The fields of a write without what no two runs have in common: the storage's address, the absolute number."""
    clock, _, *fields = entry
    fields[8] = places(fields[8])[0]
    fields[9] -= begin
    return clock, *fields


def test_nothing_is_logged_while_inactive(patched):
    patched.active = False
    writing_program()
    assert patched.writes() == []
    assert patched.clock == patched.write_count == 0


def test_writes_are_bounded(core):
    core.active = True
    kept = constants(core).WRITES_KEPT
    tensor = torch.zeros(1)
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    for _ in range(kept):
        add(tensor, 1)
    assert not core.lost_writes_after(0)
    for number in range(10):
        add(tensor, number)
    assert core.lost_writes_after(0)
    assert core.lost_writes_after(10)
    assert not core.lost_writes_after(11)
    assert core.write_count == kept + 10
    assert [entry[0] for entry in core.writes()] == list(range(11, kept + 11))
    assert [entry[2] for entry in core.writes()] == list(range(11, kept + 11))


def test_the_writes_after_a_moment(core):
    core.active = True
    write = core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)
    x = torch.ones(2)
    assert core.writes_after(0) == []
    for _ in range(5):
        write(x, 2)
        core.tick()
    log = core.writes()
    for number, entry in enumerate(log):
        assert core.writes_after(entry[0]) == log[number + 1 :]
        assert core.writes_after(entry[0] - 1) == log[number:]
    assert core.writes_after(-1) == log
    assert core.writes_after(core.clock) == []


def test_the_writes_after_a_moment_when_old_ones_were_dropped(core):
    core.active = True
    write = core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)
    x = torch.ones(1)
    for _ in range(33_000):
        write(x, 1)
    log = core.writes()
    assert core.lost_writes_after(0)
    assert not core.lost_writes_after(log[0][0])
    assert core.writes_after(0) == log
    assert core.writes_after(log[-4][0]) == log[-3:]
    assert core.writes_after(log[3][0]) == log[4:]


def test_no_logged_write_keeps_a_tensor(patched):
    tensor = torch.zeros(4)
    tensor[0] = 1
    tensor.add_(1)
    seen = weakref.ref(tensor)
    del tensor
    assert seen() is None


def test_writes_within_a_step_of_torchs_optimizers_are_left_out(core):
    core.active = True
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    names = {"add": add, "torch": torch}
    exec(compile("def step(t): add(t, 1)", core.optimizer_folder + "made_up.py", "exec"), names)
    names["step"](torch.zeros(1))
    assert len(core.writes()) == 1
    core.open_steps = 1
    names["step"](torch.zeros(1))
    assert len(core.writes()) == 1
    add(torch.zeros(1), 1)
    assert len(core.writes()) == 2
    doubled = core.writer(core.writer(torch._foreach_add_, "f", "foreach", 0, None), "f", "foreach", 1, None)
    names["add"] = lambda tensor, _: None
    exec(compile("def nested(t): doubled([t], [t])", core.optimizer_folder + "made_up.py", "exec"), names)
    names["doubled"] = doubled
    names["nested"](torch.zeros(1))
    assert len(core.writes()) == 2
    doubled([torch.zeros(1)], [torch.zeros(1)])
    assert [entry[10].codes[0] for entry in core.writes()[2:]] == [sys._getframe().f_code] * 2


def test_the_steps_and_flags_at_the_time_are_noted(core):
    core.active = True
    core.steps = 7
    zero = core.writer(torch.Tensor.zero_, "zero_", "inplace", 0, None)
    zero(torch.ones(1))
    with torch.no_grad():
        zero(torch.nn.Parameter(torch.ones(1)))
        zero(torch.ones(1))
    assert [entry[12:] for entry in core.writes()] == [(True, False, 7), (False, True, 7), (False, False, 7)]


def test_exceptions_pass_through_and_nothing_is_logged(patched):
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad") as plain:
        leaf.add_(1)
    assert plain.value.__cause__ is plain.value.__context__ is None
    with pytest.raises(IndexError):
        leaf.detach()[5] = 1
    with pytest.raises(TypeError):
        leaf.add_()
    with pytest.raises(TypeError):
        torch.add(1, 2, out=leaf, nothing=3)
    with pytest.raises(TypeError):
        torch.Tensor.__setitem__([1], 0, 1)
    with pytest.raises(TypeError):
        torch.Tensor.add_()
    assert patched.writes() == []
    assert patched.log_errors == 0


class Moody(torch.Tensor):
    """A subclass that cannot be asked about itself."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    refusal = ZeroDivisionError

    def untyped_storage(self):
        raise self.refusal("not today")


def test_an_error_while_logging_is_counted_not_raised(core):
    core.active = True
    tensor = torch.ones(2).as_subclass(Moody)
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    assert add(tensor, 1) is tensor
    assert (core.log_errors, core.writes()) == (1, [])
    with pytest.raises(ZeroDivisionError):
        core.log_write(tensor, "add_", "inplace", None, core.stack())
    core.clear()
    assert core.log_errors == 0


def test_an_interrupt_while_logging_is_not_swallowed(core):
    core.active = True
    tensor = torch.ones(2).as_subclass(Moody)
    tensor.refusal = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)(tensor, 1)


class Shrinking(torch.Tensor):
    """A subclass that empties the list it is in while it is looked at."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def untyped_storage(self):
        self.home.clear()
        return super().untyped_storage()


def test_a_list_that_shrinks_while_it_is_logged(core):
    core.active = True
    home = []
    home.extend(torch.ones(2).as_subclass(Shrinking) for _ in range(5))
    home[0].home = home
    core.writer(torch._foreach_zero_, "_foreach_zero_", "foreach", 0, None)(home)
    assert len(core.writes()) == 1
    assert home == []


@pytest.mark.parametrize("target", [(), [], [None, 1], None, 3, "text", {"a": 1}])
def test_writes_to_other_objects_are_not_logged(core, target):
    core.active = True
    assert core.writer(len_of, "op", "inplace", 0, None)(target) is target
    assert core.writer(len_of, "op", "out", -1, "out")(out=target) is target
    assert core.writer(len_of, "op", "setitem", 0, None)(target) is target
    assert core.writer(len_of, "op", "setitem", 0, None)(target, 0) is target
    assert core.writer(len_of, "op", "inplace", -1, None)(target) is target
    assert core.writer(len_of, "op", "inplace", 3, None)(target) is target
    assert (core.writes(), core.log_errors) == ([], 0)


def len_of(target=None, *_, out=None):
    return out if target is None else target


def test_a_keyword_is_found_by_its_text(core):
    core.active = True
    tensor = torch.ones(2)
    name = "".join(["o", "u", "t"])
    core.writer(torch.add, "add", "out", -1, "out")(tensor, 1, **{"alpha": 1, name: tensor})
    assert len(core.writes()) == 1


def test_a_view_whose_base_was_written_is_not_renewed(patched):
    """PyTorch would then allow the write that it refuses."""
    weight, buffer = torch.ones(2, requires_grad=True), torch.zeros(4)
    left, right = buffer[:2], buffer[2:]
    left[:] = weight * 2
    with torch.no_grad():
        right.add_(0)
        weight.add_(0)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        right.add_(weight)
    raws = logged_writes(patched)
    assert [raw.is_parameter for raw in raws] == [False, False, True]
