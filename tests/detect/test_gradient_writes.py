"""GS213: gradients overwritten in backward; whether another branch needed them is computed without the write."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each
from gradsan import _torch
from gradsan.detect.gradients import gradient_writes

every_mode = pytest.mark.parametrize("mode", ["watch", "deep"])
Scale = Callable[[torch.Tensor], torch.Tensor]


def found(watched: Any) -> list[tuple[str, str, str | None]]:
    return [(one.code, one.severity, one.tensor.name) for one in watched.diagnoses if one.code == "GS213"]


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((3,), 1.5, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)


def in_place(g: torch.Tensor) -> torch.Tensor:
    return g.mul_(0.1)


def in_place_by_operator(g: torch.Tensor) -> torch.Tensor:
    g *= 0.1
    return g


def in_place_by_assignment(g: torch.Tensor) -> torch.Tensor:
    g[...] = g * 0.1
    return g


def in_place_by_data(g: torch.Tensor) -> torch.Tensor:
    g.data.mul_(0.1)
    return g


def in_place_by_foreach(g: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([g], 0.1)
    return g


def in_place_in_a_helper(g: torch.Tensor) -> torch.Tensor:
    return in_place(g)


IN_PLACE = [
    in_place,
    in_place_by_operator,
    in_place_by_assignment,
    in_place_by_data,
    in_place_by_foreach,
    in_place_in_a_helper,
]


def out_of_place(g: torch.Tensor) -> torch.Tensor:
    return g * 0.1


def on_a_copy(g: torch.Tensor) -> torch.Tensor:
    g = g.clone()
    return g.mul_(0.1)


def on_a_result(g: torch.Tensor) -> torch.Tensor:
    g = g * 1
    g *= 0.1
    return g


def beside(g: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(g)
    total.add_(g).mul_(0.1)
    return total


OUT_OF_PLACE = [out_of_place, on_a_copy, on_a_result, beside]


def on_a_value(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    a, b = x * 2, y * 3
    b.register_hook(scale)
    (a + b).pow(2).sum().backward()
    return [x, y]


def on_a_leaf(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    x.register_hook(scale)
    (x + y).pow(2).sum().backward()
    return [y, x]


def before_a_node(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    a, b = x * 2, y * 3
    b.grad_fn.register_prehook(lambda outer: (scale(outer[0]),))
    (a + b).pow(2).sum().backward()
    return [x, y]


def after_a_node(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    total = x * 2 + y * 3
    total.grad_fn.register_hook(lambda inner, outer: (inner[0], scale(inner[1])))
    total.pow(2).sum().backward()
    return [x, y]


def before_a_module(scale: Scale) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer, (x, _) = nn.Linear(3, 3), leaves()
    layer.register_full_backward_pre_hook(lambda _, outer: (scale(outer[0]),))
    h = x * 2
    (layer(h) + h).pow(2).sum().backward()
    return [x, layer.weight]


class Scaled(torch.autograd.Function):
    """Scales its gradient in the way that is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: Scale) -> torch.Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.scale(grad), None


def in_a_function(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    a = x * 1
    (a + Scaled.apply(y * 1, scale)).pow(2).sum().backward()
    return [x, y]


SHARED = [on_a_value, on_a_leaf, before_a_node, after_a_node, before_a_module, in_a_function]


def others_gradient(program: Any, scale: Scale) -> torch.Tensor:
    return program(scale)[0].grad


@every_mode
@each("scale", IN_PLACE)
@each("program", SHARED)
def test_the_gradient_of_another_branch(program: Any, scale: Scale, mode: str) -> None:
    right = others_gradient(program, out_of_place)
    with gradsan.watch(mode) as watched:
        wrong = others_gradient(program, scale)
    assert not torch.allclose(wrong, right)
    ((code, severity, _),) = found(watched)
    assert (code, severity) == ("GS213", "warning")


@each("scale", OUT_OF_PLACE)
@each("program", SHARED)
def test_tensors_made_by_a_hook_are_its_own(program: Any, scale: Scale) -> None:
    with gradsan.watch() as watched:
        program(scale)
    assert watched.diagnoses == ()


class Masked(torch.autograd.Function):
    """Binds the name of its gradient to a copy, and writes that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        grad[0] = 0
        return grad


def rebound_before(_: Any, outer: Any) -> Any:
    outer = outer[0].clone()
    return (outer.mul_(0.1),)


def rebound_after(_: Any, inner: Any, outer: Any) -> Any:
    inner = inner[0] + outer[0]
    return (inner.mul_(0.1),)


def test_an_argument_bound_to_a_copy_is_no_gradient_of_another() -> None:
    layer, (x, y) = nn.Linear(3, 3), leaves()
    layer.register_full_backward_pre_hook(rebound_before)
    layer.register_full_backward_hook(rebound_after)
    with gradsan.watch() as watched:
        h = x * 2
        (Masked.apply(layer(h)) + h * y).pow(2).sum().backward()
    assert watched.diagnoses == ()


def on_the_outer_side(scale: Scale) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer, (x, y) = nn.Linear(3, 3), leaves()
    layer.register_full_backward_hook(lambda _, inner, outer: (scale(outer[0]), None)[1])
    (layer(x * 2) * y).sum().backward()
    return [y, x]


def alone_on_a_value(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    a, b = x * 2, y * 3
    b.register_hook(scale)
    (a * b).sum().backward()
    return [x, y]


def alone_on_a_leaf(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    y.register_hook(scale)
    (x * y).sum().backward()
    return [x, y]


def after_the_other_branch(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    a, b = x * 2, y * 3
    a.register_hook(scale)  # b is the younger one, and is done by then
    (a + b).pow(2).sum().backward()
    return [y, x]


def alone_before_a_module(scale: Scale) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer, (x, y) = nn.Linear(3, 3), leaves()
    layer.register_full_backward_pre_hook(lambda _, outer: (scale(outer[0]),))
    (layer(x * 2) * y).sum().backward()
    return [y, x]


def alone_after_a_module(scale: Scale) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer, (x, y) = nn.Linear(3, 3), leaves()
    layer.register_full_backward_hook(lambda _, inner, outer: (scale(inner[0]),))
    (layer(x * 2) * y).sum().backward()
    return [y, x]


def alone_in_a_function(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    (Scaled.apply(x * 1, scale) * y).sum().backward()
    return [y, x]


def added_up_before(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    a = x * 2
    a.register_hook(scale)
    ((a + y) + (a * y)).sum().backward()
    return [y, x]


def of_the_loss(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    loss = (x * y).sum()
    loss.register_hook(scale)
    loss.backward()
    return [x]


def with_a_gradient_given(scale: Scale) -> list[torch.Tensor]:
    x, y = leaves()
    out = x * y
    out.register_hook(scale)
    out.backward(torch.ones(3))
    return [x]


ALONE = [
    alone_on_a_value,
    alone_on_a_leaf,
    after_the_other_branch,
    alone_before_a_module,
    alone_after_a_module,
    on_the_outer_side,
    alone_in_a_function,
    added_up_before,
    of_the_loss,
    with_a_gradient_given,
]


@every_mode
@each("program", ALONE)
def test_a_gradient_that_nobody_else_needs_is_a_note(program: Any, mode: str) -> None:
    written, copied = others_gradient(program, in_place), others_gradient(program, out_of_place)
    assert torch.equal(written, copied)
    with gradsan.watch(mode) as watched:
        program(in_place)
    assert [(code, severity) for code, severity, _ in found(watched)] == [("GS213", "note")]


@each(
    ("program", "name"),
    [
        (lambda: on_a_value(lambda upstream: upstream.mul_(0.1)), "upstream"),
        (lambda: on_a_value(in_place_in_a_helper), "g"),
        (lambda: in_a_function(in_place), "grad"),
        (lambda: before_a_node(in_place), "outer[0]"),
    ],
)
def test_the_name_is_that_of_the_hooks_argument(program: Any, name: str) -> None:
    with gradsan.watch() as watched:
        program()
    assert [one[2] for one in found(watched)] == [name]


def test_the_branching_operation_and_the_other_branch_are_named() -> None:
    x, y = leaves()
    with gradsan.watch() as watched:
        one, other = x * 2, y * 3
        other.register_hook(in_place)
        total = one + other
        total.clone().view(3, 1).pow(2).sum().backward()
    (diagnosis,) = watched.diagnoses
    (shared,) = (label for label in diagnosis.labels if label.role == "note")
    assert shared.message.values["op"] == "add"
    (written,) = (label for label in diagnosis.labels if label.role == "written")
    assert written.message.values["sibling"] == "one"


def test_a_leaf_of_the_other_branch_is_named() -> None:
    with gradsan.watch() as watched:
        weight, shift = leaves()
        weight.register_hook(in_place)
        (weight + shift).pow(2).sum().backward()
    (written,) = (label for label in watched.diagnoses[0].labels if label.role == "written")
    assert written.message.values["sibling"] == "shift"


def test_outputs_of_one_function_that_get_the_same_gradient() -> None:
    class Twins(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x * 2, y * 3

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0].mul_(2), grads[1] * 3

    with gradsan.watch() as watched:
        x, y = leaves()
        a, b = Twins.apply(x * 1, y * 1)
        (a + b).pow(2).sum().backward()
    assert found(watched) == [("GS213", "warning", "grads[0]")]


def test_many_rounds_are_one_finding() -> None:
    with gradsan.watch() as watched:
        for _ in range(5):
            on_a_value(in_place)
    (one,) = watched.diagnoses
    assert (one.code, one.count) == ("GS213", 5)


def test_a_note_becomes_a_warning_when_the_same_place_meets_another_branch() -> None:
    with gradsan.watch() as watched:
        for shared in (False, True, False):
            x, y = leaves()
            a, b = x * 2, y * 3
            b.register_hook(in_place)
            (a + b if shared else a * b).pow(2).sum().backward()
    assert [(one.severity, one.count) for one in watched.diagnoses] == [("warning", 3)]


@every_mode
def test_other_writes_during_backward_are_no_finding(mode: str) -> None:
    torch.manual_seed(0)
    norms = torch.zeros(())
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def keep(g: torch.Tensor) -> None:
        norms.add_(g.norm())

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad.mul_(0.5)
        optimizer.step()
        parameter.grad = None

    def block(t: torch.Tensor) -> torch.Tensor:
        t = layer(t)
        t.mul_(2)
        return torch.relu_(t)

    with gradsan.watch(mode) as watched:
        layer.weight.register_post_accumulate_grad_hook(step)
        for reentrant in (False, True):
            x = torch.ones(2, 3, requires_grad=True)
            h = x * 1
            h.register_hook(keep)
            out = checkpoint(block, h, use_reentrant=reentrant) + h
            out.pow(2).sum().backward()
    assert found(watched) == []


def test_a_gradient_that_is_part_of_a_graph_is_autograds_affair() -> None:
    with gradsan.watch() as watched:
        x, y = leaves()
        a, b = x * 2, y * 3
        b.register_hook(in_place)
        torch.autograd.grad((a + b).pow(2).sum(), x, create_graph=True)
    assert found(watched) == []


def test_writes_of_other_threads_are_not_those_of_the_backward() -> None:
    begun, done = threading.Event(), threading.Event()
    other = torch.ones(3)

    def write(g: torch.Tensor) -> None:
        begun.wait(5)
        g.mul_(2)
        done.set()

    def wait(g: torch.Tensor) -> None:
        begun.set()
        done.wait(5)

    with gradsan.watch() as watched:
        worker = threading.Thread(target=write, args=(other,))
        worker.start()
        x, _ = leaves()
        h = x * 2
        h.register_hook(wait)
        h.sum().backward()
        worker.join()
    assert other.tolist() == [2, 2, 2]
    assert found(watched) == []


def test_hooks_without_frames_of_their_own_pass() -> None:
    with gradsan.watch() as watched:
        on_a_value(functools.partial(torch.mul, 0.1))
    assert found(watched) == []


def test_uncounted_writes_stay_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "use_count", lambda _: None)
    gradient_writes.counts.cache_clear()
    try:
        with gradsan.watch() as watched:
            on_a_value(in_place)
    finally:
        gradient_writes.counts.cache_clear()
    assert found(watched) == [("GS213", "note", "g")]


def test_each_kind_of_hook_is_tried_out() -> None:
    kinds = {"hook", "node_hook_1[0]", "node_hook_2[0]", "node_hook_2[1]", "function_backward"}
    kinds |= {"module_hook_1[0]", "module_hook_2[0]", "module_hook_2[1]"}
    assert set(gradient_writes.counts()) == kinds


def test_no_gradient_is_kept_alive() -> None:
    kept = []

    def scale(g: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(g))
        return g.mul_(0.1)

    with gradsan.watch():
        on_a_value(scale)
        gc.collect()
        assert kept[0]() is None
