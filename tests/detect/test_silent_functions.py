"""Checkpointed and custom Functions, in both modes: a finding where the gradient is wrong, none elsewhere."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gradsan
from cases import each
from gradsan.detect.memory import Notes

MODES = ("watch", "deep")
every_mode = pytest.mark.parametrize("mode", MODES)
both_forms = pytest.mark.parametrize("reentrant", [False, True], ids=["frames", "reentrant"])

FACTOR = torch.full((3,), 2.0)


def errors(watched: Any) -> list[Any]:
    return [one for one in watched.diagnoses if one.severity != "note"]


def leaf() -> torch.Tensor:
    return torch.full((3,), 1.5, requires_grad=True)


def found(watched: Any) -> tuple[str, str | None]:
    (one,) = errors(watched)
    assert one.silent
    return one.code, None if one.tensor is None else one.tensor.name


class Scaled(nn.Module):
    """A module with a parameter, a buffer, a plain tensor, a number and a flag, all of which its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 3.0))
        self.register_buffer("mask", torch.ones(3))
        self.offset = torch.zeros(3)
        self.gain = 2.0
        self.calls = 0
        self.last: torch.Tensor | None = None

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = t.detach()
        gain = self.gain if self.training else 0.5
        return (t * self.weight * self.mask * gain + self.offset).sin()


def as_closure(reentrant: bool) -> Any:
    factor = torch.full((3,), 2.0)
    return lambda x: checkpoint(lambda t: t * factor, x, use_reentrant=reentrant), lambda: factor.zero_(), "factor"


def as_global(reentrant: bool) -> Any:
    def function(t: torch.Tensor) -> torch.Tensor:
        return t * FACTOR

    def undone() -> None:
        FACTOR.add_(1)

    return lambda x: checkpoint(function, x, use_reentrant=reentrant), undone, "FACTOR"


def as_default(reentrant: bool) -> Any:
    factor = torch.full((3,), 2.0)

    def function(t: torch.Tensor, by: torch.Tensor = factor) -> torch.Tensor:
        return t * by

    return lambda x: checkpoint(function, x, use_reentrant=reentrant), lambda: factor.zero_(), "factor"


def as_partial(reentrant: bool) -> Any:
    factor = torch.full((3,), 2.0)
    function = functools.partial(torch.mul, factor)
    return lambda x: checkpoint(function, x, use_reentrant=reentrant), lambda: factor.zero_(), "factor"


def as_element(reentrant: bool) -> Any:
    factors = {"first": [torch.full((3,), 2.0)]}
    return (
        lambda x: checkpoint(lambda t: t * factors["first"][0], x, use_reentrant=reentrant),
        lambda: factors["first"][0].zero_(),
        'factors["first"][0]',
    )


def as_list_argument(reentrant: bool) -> Any:
    factors = [torch.full((3,), 2.0)]
    return (
        lambda x: checkpoint(lambda t, by: t * by[0], x, factors, use_reentrant=reentrant),
        lambda: factors[0].zero_(),
        "factors[0]",
    )


def as_attribute_of_an_object(reentrant: bool) -> Any:
    options = types.SimpleNamespace(factor=torch.full((3,), 2.0))
    return (
        lambda x: checkpoint(lambda t: t * options.factor, x, use_reentrant=reentrant),
        lambda: options.factor.zero_(),
        "options.factor",
    )


def in_a_helper(reentrant: bool) -> Any:
    factor = torch.full((3,), 2.0)

    def helper(t: torch.Tensor) -> torch.Tensor:
        return t * factor

    return lambda x: checkpoint(lambda t: helper(t), x, use_reentrant=reentrant), lambda: factor.zero_(), "factor"


def parameter(reentrant: bool) -> Any:
    net = Scaled()
    step = torch.optim.SGD(net.parameters(), lr=0.5)

    def write() -> None:
        net.weight.grad = torch.ones(3)
        step.step()

    return lambda x: checkpoint(net, x, use_reentrant=reentrant), write, "Scaled.weight"


def buffer(reentrant: bool) -> Any:
    net = Scaled()
    return lambda x: checkpoint(net, x, use_reentrant=reentrant), lambda: net.mask.mul_(2), "Scaled.mask"


def of_a_bound_method(reentrant: bool) -> Any:
    net = Scaled()
    return lambda x: checkpoint(net.forward, x, use_reentrant=reentrant), lambda: net.mask.mul_(2), "Scaled.mask"


def past_the_counter(reentrant: bool) -> Any:
    factor = torch.full((3,), 2.0)
    return lambda x: checkpoint(lambda t: t * factor, x, use_reentrant=reentrant), lambda: factor.data.zero_(), "factor"


def outside_of_torch(reentrant: bool) -> Any:
    factor = torch.full((3,), 2.0)
    return (
        lambda x: checkpoint(lambda t: t * factor, x, use_reentrant=reentrant),
        lambda: factor.numpy().fill(7),
        "factor",
    )


WRITTEN = [
    as_closure,
    as_global,
    as_default,
    as_partial,
    as_element,
    as_list_argument,
    as_attribute_of_an_object,
    in_a_helper,
    parameter,
    buffer,
    of_a_bound_method,
    past_the_counter,
    outside_of_torch,
]


@every_mode
@both_forms
@each("case", WRITTEN)
def test_written_globals_of_a_checkpointed_function(case: Any, reentrant: bool, mode: str) -> None:
    run, _, _ = case(reentrant)
    x = leaf()
    run(x).sum().backward()
    right = x.grad
    with gradsan.watch(mode) as watched:
        run, write, name = case(reentrant)
        x = leaf()
        y = run(x)
        with torch.no_grad():
            write()
        y.sum().backward()
    assert not torch.allclose(x.grad, right)
    assert found(watched) == ("GS210", name)


@every_mode
@both_forms
@each("case", WRITTEN)
def test_unwritten_values_are_no_finding(case: Any, reentrant: bool, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        run, write, _ = case(reentrant)
        x = leaf()
        run(x).sum().backward()
        with torch.no_grad():
            write()
        run(leaf()).sum().backward()
    assert watched.diagnoses == ()


@every_mode
@both_forms
def test_a_loops_variable_is_looked_up_late(reentrant: bool, mode: str) -> None:
    layers = [torch.full((3,), float(number + 2), requires_grad=True) for number in range(3)]
    with gradsan.watch(mode) as watched:
        y = leaf()
        for layer in layers:
            y = checkpoint(lambda t: (t * layer).sin(), y, use_reentrant=reentrant)  # noqa: B023
        y.sum().backward()
    assert [(one.code, one.count) for one in errors(watched)] == [("GS210", 2)]
    with gradsan.watch(mode) as watched:
        y = leaf()
        for layer in layers:
            y = checkpoint(lambda t, by=layer: (t * by).sin(), y, use_reentrant=reentrant)
        y.sum().backward()
    assert watched.diagnoses == ()


@every_mode
@both_forms
@each(("name", "value"), [("gain", 3.0), ("offset", torch.ones(3)), ("training", False), ("mask", torch.zeros(3))])
def test_replaced_values_of_a_checkpointed_forward(name: str, value: Any, reentrant: bool, mode: str) -> None:
    net = Scaled()
    with gradsan.watch(mode) as watched:
        y = checkpoint(net, leaf(), use_reentrant=reentrant)
        setattr(net, name, value)
        y.sum().backward()
    assert [one.code for one in errors(watched)] == ["GS210"]


def test_a_number_that_only_a_node_of_the_forward_keeps_does_not_matter() -> None:
    for mode, severity in (("watch", "warning"), ("deep", "note")):
        exponent = 2
        with gradsan.watch(mode) as watched:
            x = leaf()
            y = checkpoint(lambda t: t**exponent, x, use_reentrant=False)  # noqa: B023
            exponent = 3
            y.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))
        assert [(one.code, one.severity) for one in watched.diagnoses] == [("GS210", severity)]


@every_mode
def test_segments_are_checkpoints(mode: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    with gradsan.watch(mode) as watched:
        y = checkpoint_sequential(net, 2, leaf(), use_reentrant=False)
        with torch.no_grad():
            net[0].weight.mul_(2)
        y.sum().backward()
    assert found(watched) == ("GS210", "net.0.weight")


@every_mode
def test_keyword_arguments_are_not_checked_by_torch(mode: str) -> None:
    factor = torch.full((3,), 2.0)
    with gradsan.watch(mode) as watched:
        y = checkpoint(lambda t, by: t * by, leaf(), by=factor, use_reentrant=False)
        factor.zero_()
        y.sum().backward()
    assert found(watched) == ("GS210", "factor")


@every_mode
@both_forms
def test_writes_of_the_function_itself_are_no_change(reentrant: bool, mode: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.LSTM(4, 4))
    scaled, step = Scaled(), torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsan.watch(mode) as watched:
        for _ in range(3):
            x = torch.randn(5, 3, requires_grad=True)
            y, _ = checkpoint(net, x, use_reentrant=reentrant)
            z, _ = checkpoint(net, x * 2, use_reentrant=reentrant)
            s = checkpoint(scaled, x, use_reentrant=reentrant) + checkpoint(scaled, x * 2, use_reentrant=reentrant)
            (y.sum() + z.sum() + s.sum()).backward()
            step.step()
            net.eval()
            net(x)
            net.train()
    assert watched.diagnoses == ()


class Caching(nn.Module):
    """Keeps books of its own calls: counters, lists, tables, a mask made when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.calls, self.means = 0, list[float]()
        self.table: dict[str, torch.Tensor] = {}
        self._mask: torch.Tensor | None = None

    def mask(self, rows: int) -> torch.Tensor:
        if self._mask is None or len(self._mask) != rows:
            self._mask = torch.ones(rows, 4)
        return self._mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.means.append(float(x.detach().mean()))
        self.table["last"] = x.detach().mean()
        return self.lin(x) * self.mask(len(x))


@every_mode
@both_forms
@each(
    "made",
    [
        Caching,
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.PReLU(), nn.Softplus()),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        lambda: nn.GRU(4, 4),
    ],
)
def test_modules_with_books_of_their_own(made: Any, reentrant: bool, mode: str) -> None:
    torch.manual_seed(0)
    net = made()
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsan.watch(mode) as watched:
        for rows in (3, 5, 4):
            x = torch.randn(rows, 4, requires_grad=True)
            results = [checkpoint(net, given, use_reentrant=reentrant) for given in (x, x * 2)]
            parts = [one[0] if isinstance(one, tuple) else one for one in results]
            (parts[0].sum() + parts[1].pow(2).sum()).backward()
            step.step()
            step.zero_grad()
    assert watched.diagnoses == ()


@both_forms
def test_state_that_further_calls_update_is_a_warning(reentrant: bool) -> None:
    torch.manual_seed(0)
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    with gradsan.watch() as watched:
        x = torch.randn(3, 4, requires_grad=True)
        y = checkpoint(net, x, use_reentrant=reentrant)
        z = checkpoint(net, x * 2, use_reentrant=reentrant)
        (y.pow(2).sum() + z.pow(2).sum()).backward()
    assert [(one.code, one.severity) for one in watched.diagnoses] == [("GS210", "warning")]


@every_mode
@both_forms
def test_changes_that_the_function_does_not_read_are_no_finding(reentrant: bool, mode: str) -> None:
    class Pair:
        def __init__(self) -> None:
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other = torch.ones(3)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).tanh()

    pair, shaped = Pair(), torch.ones(3)
    with gradsan.watch(mode) as watched:
        y = pair.run(leaf())
        z = checkpoint(lambda t: t.reshape(shaped.shape).sin(), leaf(), use_reentrant=reentrant)
        pair.other = torch.zeros(3)
        shaped.zero_()
        with torch.no_grad():
            pair.second.weight.zero_()
        (y + z).sum().backward()
    assert watched.diagnoses == ()


def test_deep_mode_compares_what_was_recomputed() -> None:
    factor, unused = torch.full((3,), 2.0), torch.ones(3)
    with gradsan.watch("deep") as watched:
        y = checkpoint(lambda t: t.sin() * factor + unused, leaf(), use_reentrant=False)
        unused.zero_()  # added, so that no gradient depends on it
        y.sum().backward()
    assert [(one.code, one.severity) for one in watched.diagnoses] == [("GS210", "note")]


@both_forms
def test_deep_mode_reports_a_change_without_a_write(reentrant: bool) -> None:
    torch.manual_seed(0)
    with gradsan.watch("deep") as watched:
        y = checkpoint(
            lambda t: torch.nn.functional.dropout(t.sin(), 0.5).sin(),
            torch.full((300,), 1.5, requires_grad=True),
            use_reentrant=reentrant,
            preserve_rng_state=False,
        )
        y.sum().backward()
    assert [(one.code, one.severity) for one in errors(watched)] == [("GS210", "error")]


@both_forms
def test_a_checkpoint_lives_no_longer_than_without(reentrant: bool) -> None:
    def made() -> Any:
        factor = torch.full((3,), 2.0)
        y = checkpoint(lambda t: t * factor, leaf(), use_reentrant=reentrant)
        return weakref.ref(factor), y

    with gradsan.watch():
        alive, y = made()
        assert alive() is not None, "its graph waits for the recomputation"
        y.sum().backward()
        del y
        gc.collect()
        assert alive() is None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: Any) -> torch.Tensor:
        keep(ctx, x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.x
        while not torch.is_tensor(x):
            x = x[0] if isinstance(x, list) else x["x"] if isinstance(x, dict) else x.x
        return 2 * x * grad, None


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Plain:
    def __init__(self, x: Any) -> None:
        self.x, self.step = x, torch.zeros(())


@dataclass
class Record:
    x: Any
    scale: float = 2.0


KEPT = {
    "itself": lambda ctx, x: setattr(ctx, "x", x),
    "detached": lambda ctx, x: setattr(ctx, "x", x.detach()),
    "in_containers": lambda ctx, x: setattr(ctx, "x", [{"x": x}]),
    "in_a_namespace": lambda ctx, x: setattr(ctx, "x", SimpleNamespace(x=x)),
    "in_a_record": lambda ctx, x: setattr(ctx, "x", Record(x)),
    "in_slots": lambda ctx, x: setattr(ctx, "x", Slotted(x)),
    "in_an_object_with_a_list": lambda ctx, x: setattr(ctx, "x", Plain([x.detach()])),
    "in_a_list_of_objects": lambda ctx, x: setattr(ctx, "x", [Plain(x)]),
}
WAYS = {
    "counted": lambda h: h.detach().mul_(3),
    "data": lambda h: h.data.mul_(3),
    "numpy": lambda h: h.detach().numpy().fill(9),
    "storage": lambda h: h.untyped_storage().fill_(0),
    "set_data": lambda h: setattr(h, "data", torch.zeros(3)),
}


@every_mode
@each("way", WAYS)
@each("kept", KEPT)
def test_written_attributes_of_ctx(kept: str, way: str, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = leaf()
        h = x * 1
        y = Square.apply(h, KEPT[kept])
        WAYS[way](h)
        y.sum().backward()
    wrong = not torch.allclose(x.grad, torch.full((3,), 3.0))
    assert [one.code for one in errors(watched)] == (["GS211"] if wrong else [])


def test_a_backward_of_one_function_of_many_looks_at_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    changed = Notes.changed
    monkeypatch.setattr(Notes, "changed", lambda self, *args: looked.append(args) or changed(self, *args))
    with gradsan.watch() as watched:
        values = [leaf() * 1 for _ in range(200)]
        results = [Square.apply(value, KEPT["itself"]) for value in values]
        WAYS["counted"](values[150])
        for result in results:
            result.sum().backward()
    assert [one.code for one in errors(watched)] == ["GS211"]
    assert len(looked) < 10 * len(results)


class Keeper(torch.autograd.Function):
    """Keeps a whole object, of which its backward reads one value, and the shape of another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Any) -> torch.Tensor:
        ctx.owner = owner
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad.expand(ctx.owner.like.shape) * ctx.owner.factor, None


@every_mode
@each("made", [SimpleNamespace, type("Trainer", (nn.Module,), {})])
def test_unread_attributes_of_an_object_are_no_finding(made: Any, mode: str) -> None:
    owner = made()
    owner.factor, owner.like, owner.steps, owner.inner = 1.0, torch.ones(3), torch.zeros(()), Plain(torch.ones(3))
    with gradsan.watch(mode) as watched:
        y = Keeper.apply(leaf() * 1, owner)
        owner.steps.add_(1)
        owner.like.zero_()
        owner.inner.x.zero_()
        y.sum().backward()
    assert errors(watched) == []


@every_mode
def test_writes_after_the_backward_are_no_finding(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        for _ in range(3):
            h = leaf() * 1
            Square.apply(h, KEPT["itself"]).sum().backward()
            h.detach().mul_(3)
    assert watched.diagnoses == ()


@every_mode
def test_another_part_of_the_memory_is_nothing(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = torch.full((6,), 1.5, requires_grad=True)
        h = x * 1
        y = Square.apply(h[:3], KEPT["itself"])
        h.detach()[3:].mul_(3)
        y.sum().backward()
    assert errors(watched) == []


class Shaped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.like, ctx.unread = x, x, x
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(ctx.like) * grad.expand(ctx.x.shape)


@every_mode
def test_tensors_read_only_for_their_size_are_no_finding(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = leaf()
        h = x * 1
        y = Shaped.apply(h)
        h.detach().zero_()
        y.backward()
    assert torch.equal(x.grad, torch.ones(3))
    assert watched.diagnoses == ()


def test_ctx_lives_no_longer_than_without() -> None:
    with gradsan.watch():
        h = leaf() * 1
        y = Square.apply(h, KEPT["detached"])
        alive = weakref.ref(y.grad_fn)
        del h, y
        gc.collect()
        assert alive() is None


class Triple(torch.autograd.Function):
    """Writes its input; ``mark`` says whether it tells autograd, ``result`` what it returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: bool, result: Any) -> torch.Tensor:
        x.mul_(3)
        if mark:
            ctx.mark_dirty(x)
        return result(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return 3 * grad, None, None


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


RESULTS = {"itself": itself, "clone": torch.clone}
INPUTS = {
    "result": lambda x: (x * 1,) * 2,
    "view": lambda x: ((h := x * 1)[:], h),
}


@every_mode
@each("given", INPUTS)
@each("result", RESULTS)
def test_an_input_written_and_not_marked_was_used_again(result: str, given: str, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = leaf()
        handed, again = INPUTS[given](x)
        y = Triple.apply(handed, False, RESULTS[result])
        (y + again * 2).sum().backward()
    assert not torch.allclose(x.grad, torch.full((3,), 9.0))
    assert found(watched) == ("GS212", "x")
    assert errors(watched)[0].severity == "warning"


@every_mode
@each("given", INPUTS)
@each("result", RESULTS)
def test_an_input_that_is_not_used_again_is_nothing(result: str, given: str, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        for _ in range(2):
            x = leaf()
            handed, before = INPUTS[given](x)
            before = before + 1
            (Triple.apply(handed, False, RESULTS[result]) + before).sum().backward()
    assert torch.allclose(x.grad, torch.full((3,), 4.0))
    assert errors(watched) == []


@every_mode
@each("given", INPUTS)
def test_an_input_that_was_marked_is_nothing(given: str, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = leaf()
        handed, again = INPUTS[given](x)
        y = Triple.apply(handed, True, itself)
        (y + again * 2).sum().backward()
    assert torch.allclose(x.grad, torch.full((3,), 9.0))
    assert watched.diagnoses == ()


class Numbered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        array = x.detach().numpy()
        numpy.multiply(array, 3, out=array)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3 * grad


@every_mode
def test_an_input_written_by_numpy_was_used_again(mode: str) -> None:
    with gradsan.watch(mode) as watched:
        x = leaf()
        h = x * 1
        y = Numbered.apply(h)
        (y + h).sum().backward()
    assert "GS212" in [one.code for one in errors(watched)]


@every_mode
def test_buffers_that_a_forward_updates_are_nothing(mode: str) -> None:
    class Averaged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
            mean.mul_(0.9).add_(x.mean(), alpha=0.1)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * 2, None

    mean = torch.zeros(())
    with gradsan.watch(mode) as watched:
        for _ in range(3):
            x = leaf()
            (Averaged.apply(x * 1, mean) * (mean + 1)).sum().backward()
    assert watched.diagnoses == ()


def test_transforms_of_custom_functions_are_left_alone() -> None:
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            (ctx.x,) = inputs
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    with gradsan.watch() as watched:
        found = torch.func.vmap(torch.func.grad(Cube.apply))(torch.ones(4))
    assert torch.equal(found, torch.full((4,), 3.0))
    assert watched.diagnoses == ()


def test_everything_is_put_back() -> None:
    frames = torch.utils.checkpoint._CheckpointFrame
    kind = torch.utils.checkpoint.CheckpointFunction
    checks = dict(torch.utils.checkpoint._allowed_determinism_checks_to_fns)
    before = {**vars(frames)}, {**vars(kind)}, {**vars(torch.autograd.Function)}
    with gradsan.watch("deep"):
        assert vars(frames)["get_inputs"] is not before[0]["get_inputs"]
    assert ({**vars(frames)}, {**vars(kind)}, {**vars(torch.autograd.Function)}) == before
    assert torch.utils.checkpoint._allowed_determinism_checks_to_fns == checks
