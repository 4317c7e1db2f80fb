"""Healing of some conflicts only, and within a bound that counts every copy that is alive."""

import inspect

import pytest
import torch

import gradsan
from cases import each
from gradsan.record.recorder import recorder

HERE = __file__


def result_overwritten():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    y.detach().zero_()
    return x, y.sum()


def operand_overwritten():
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()
    y.detach().zero_()
    return x, loss


def through_data():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    y.data.zero_()
    return x, y.sum()


def emptied():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    loss = y.sum()
    y.untyped_storage().resize_(0)
    return x, loss


CODES = {result_overwritten: "GS101", operand_overwritten: "GS102", through_data: "GS202", emptied: "GS209"}


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


@each("build", CODES)
def test_selected_conflicts_are_healed(build):
    with gradsan.watch("heal") as watched:
        x, loss = build()
        loss.backward()
    right = x.grad
    with gradsan.heal(only=CODES[build]) as watched:
        x, loss = build()
        loss.backward()
    assert torch.equal(x.grad, right)
    assert {one.severity for one in watched.diagnoses} == {"warning"}


@each("build", CODES)
@each("rule", ["GS105", "elsewhere.py", "GS999"])
def test_everything_else_is_as_pytorch_has_it(build, rule):
    with gradsan.heal(only=rule) as watched:
        x, loss = build()
        if build is through_data:
            loss.backward()
            assert x.grad.tolist() == [0] * 4
        else:
            expected = gradsan.MemoryFreedError if build is emptied else RuntimeError
            with pytest.raises(expected, match="resized to 0" if build is emptied else "modified by an inplace"):
                loss.backward()
    [found] = {one.code: one for one in watched.diagnoses}.values()
    assert (found.code, found.severity) == (CODES[build], "error")
    assert found.gradient.status == ("wrong" if build is through_data else "raised")


def test_a_rule_may_name_a_line():
    only = f"test_heal_bounds.py:{line_of(result_overwritten, 'zero_')}"
    with gradsan.heal(only=only) as watched:
        x, loss = result_overwritten()
        loss.backward()
        _, other = operand_overwritten()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            other.backward()
    assert torch.equal(x.grad, torch.ones(4).exp())
    assert [(one.code, one.severity) for one in watched.diagnoses] == [("GS101", "warning"), ("GS102", "error")]


def test_of_nested_stretches_each_heals_its_own():
    with gradsan.heal(only="GS101"), gradsan.heal(only="GS102"):
        result_overwritten()[1].backward()
        operand_overwritten()[1].backward()
    with gradsan.heal(only="GS101"), gradsan.heal():
        operand_overwritten()[1].backward()
    with gradsan.heal(only="GS101"), gradsan.watch("deep"), pytest.raises(RuntimeError, match="inplace"):
        operand_overwritten()[1].backward()


def test_invalid_bounds_are_refused():
    with pytest.raises(ValueError):
        gradsan.heal(only="GS1")
    with pytest.raises(ValueError):
        gradsan.watch("heal", only=())


def taken():
    return recorder().watching.deep.holdings.bytes


def test_a_write_separates_an_original():
    with gradsan.heal(max_bytes=1_000):
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        z = y * y  # saves y twice more; all three share their memory
        assert taken() == 0
        y.detach().zero_()
        assert taken() == 16
        y.detach().add_(1)
        assert taken() == 16
        del z, y
        assert taken() == 0


def test_the_whole_storage_of_a_view_counts():
    with gradsan.heal(max_bytes=1_000):
        base = torch.ones(100)
        x = torch.ones(2, requires_grad=True)
        y = x * base[:2]
        base.add_(1)
        assert taken() == 400
        del y
        assert taken() == 0


def test_copies_count_from_the_save():
    with gradsan.heal(max_bytes=1_000):
        x = torch.ones(4, requires_grad=True)
        shared = torch.from_numpy(torch.ones(4).numpy().copy())
        y = x * shared
        assert taken() == 16
        del y
        assert taken() == 0


def test_copies_used_by_a_backward_do_not_count():
    with gradsan.heal(max_bytes=1_000):
        _, loss = result_overwritten()
        assert taken() == 16
        loss.backward()
        assert taken() == 0


def test_the_bound_ends_healing_at_the_write():
    y = None
    with gradsan.heal(max_bytes=15):
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        with pytest.raises(gradsan.HealingEndedError, match="take 16 bytes, and may take 15"):
            y.detach().zero_()
    with gradsan.heal(max_bytes=16):
        result_overwritten()[1].backward()


def test_the_bound_ends_healing_at_the_save():
    with gradsan.heal(max_bytes=40):
        x = torch.ones(4, requires_grad=True)
        kept = [x * torch.from_numpy(torch.ones(4).numpy().copy()) for _ in range(2)]
        shared = torch.from_numpy(torch.ones(4).numpy().copy())
        with pytest.raises(gradsan.HealingEndedError):
            x * shared
        del kept
        # What is let go makes room.
        x * shared


def test_the_bound_ends_healing_at_the_step():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with gradsan.heal(max_bytes=15):
        loss = (parameter * parameter).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(gradsan.HealingEndedError):
            optimizer.step()


def test_writes_that_nobody_watches_are_seen_at_the_backward():
    with gradsan.heal(max_bytes=15):
        x = torch.ones(4, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        alias = y.detach().numpy()
        alias[:] = 0
        with pytest.raises(gradsan.HealingEndedError):
            loss.backward()


def test_steps_that_are_let_go_never_reach_the_bound():
    parameter = torch.nn.Parameter(torch.ones(1_000))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    with gradsan.heal(max_bytes=20_000) as watched:
        for _ in range(30):
            optimizer.zero_grad()
            loss = (parameter * parameter).exp().sum()
            loss.backward()
            optimizer.step()
    assert watched.diagnoses == ()


def test_the_tightest_bound_holds():
    with gradsan.heal(max_bytes=15):
        with gradsan.heal(max_bytes=1_000), pytest.raises(gradsan.HealingEndedError):
            result_overwritten()
        with gradsan.heal(), pytest.raises(gradsan.HealingEndedError):
            result_overwritten()
    assert recorder().watching.deep.holdings is None
    with gradsan.heal():
        result_overwritten()[1].backward()
