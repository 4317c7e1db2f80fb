"""Stopping at the first conflict: where it is found, by which error, and what is let through."""

import pytest
import torch

import gradsan
from cases import each
from gradsan.suppress import rules_of

MODES = ["watch", "deep"]


def through_data():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.data.mul_(2)
    return x, y.sum()


def through_numpy():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.detach().numpy()[:] = 0
    return x, y.sum()


def counted():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.detach().mul_(2)
    return x, y.sum()


def under_hooks():
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = x.exp()
    y.detach().mul_(2)
    return x, y.sum()


def in_a_checkpoint():
    scale = [torch.ones(3)]
    x = torch.ones(3, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(lambda t: (t * scale[0]).exp(), x, use_reentrant=False).sum()
    scale[0].mul_(2)
    return x, loss


def on_the_context():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.factor, None

    x, factor = torch.ones(3, requires_grad=True), torch.ones(3)
    loss = Scaled.apply(x, factor).sum()
    factor.mul_(2)
    return x, loss


SILENT = [through_data, through_numpy, under_hooks, in_a_checkpoint, on_the_context]


@pytest.mark.parametrize("native", [True, False])
@each("build", SILENT)
def test_a_silent_conflict_stops_the_program_at_its_backward(build, native):
    watched = gradsan.watch(halt=True, native=native)
    built = []

    def train():
        for _ in range(2):
            built.append(build())
            built[-1][1].backward()

    with pytest.raises(gradsan.HaltError) as stopped, watched:
        train()
    [(x, _)] = built
    [found] = watched.diagnoses
    assert (found.silent, found.count) == (True, 1)
    assert found.code in str(stopped.value)
    assert {"used", "written"} <= {label.role for label in found.labels}
    assert any(found.code in note for note in stopped.value.__notes__)
    assert x.grad is None


@pytest.mark.parametrize("build", [through_data, through_numpy])
def test_deep_mode_stops_too(build):
    watched = gradsan.watch("deep", halt=True)
    with pytest.raises(gradsan.HaltError), watched:
        build()[1].backward()
    [found] = watched.diagnoses
    assert found.gradient.status == "wrong"


@pytest.mark.parametrize("mode", MODES)
def test_pytorchs_own_error_comes_first(mode):
    watched = gradsan.watch(mode, halt=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised, watched:
        counted()[1].backward()
    assert not isinstance(raised.value, gradsan.GradsanError)


@pytest.mark.parametrize("mode", MODES)
def test_a_program_that_catches_errors_is_stopped_at_its_next_backward(mode):
    rounds = []

    def train():
        for _ in range(3):
            rounds.append(counted()[1])
            try:
                rounds[-1].backward()
            except RuntimeError as error:
                if isinstance(error, gradsan.HaltError):
                    raise

    with pytest.raises(gradsan.HaltError), gradsan.watch(mode, halt=True):
        train()
    assert len(rounds) == 2


def test_it_stays_stopped():
    with gradsan.watch(halt=True):
        for build in (through_data, lambda: (None, (torch.ones(3, requires_grad=True) * 2).sum())):
            with pytest.raises(gradsan.HaltError):
                build()[1].backward()
    # The next stretch is another.
    with gradsan.watch(halt=True):
        (torch.ones(3, requires_grad=True) * 2).sum().backward()


def test_a_right_program_is_not_stopped():
    x = torch.ones(3, requires_grad=True)
    with gradsan.watch(halt=True) as watched:
        for _ in range(3):
            loss = (x * 2).exp().sum()
            loss.backward()
            with torch.no_grad():
                x -= 0.1 * x.grad
    assert watched.diagnoses == ()


def test_healed_conflicts_stop_only_strictly():
    with gradsan.watch("heal", halt=True):
        through_data()[1].backward()
    with pytest.raises(gradsan.HaltError), gradsan.watch("heal", halt=True, strict=True):
        through_data()[1].backward()


def test_strictly_a_note_is_a_warning():
    for strict, severity in ((False, "note"), (True, "warning")):
        with gradsan.watch("heal", strict=strict) as watched:
            base = torch.ones(4, requires_grad=True) * 1
            loss = (base[:2] * base[:2]).sum()
            with torch.no_grad():
                base[2:].mul_(5)
            loss.backward()
        assert [one.severity for one in watched.diagnoses] == [severity]


def test_the_inner_stretch_that_asks_is_enough():
    with gradsan.watch():
        with pytest.raises(gradsan.HaltError), gradsan.watch(halt=True):
            through_data()[1].backward()
        through_data()[1].backward()


def test_everything_is_put_back():
    from gradsan.record.recorder import recorder

    with gradsan.watch(halt=True):
        pass
    assert recorder().demands.before_backward not in recorder().listeners.before_backward


@each(
    ("scope", "rules"),
    [
        ("GS101", ["GS101"]),
        ("GS101, train.py:12", ["GS101", "*:train.py:12"]),
        (["GS2xx", "GS110:a/b.py"], ["GS2xx", "GS110:a/b.py"]),
        ("src/*.py", ["*:src/*.py"]),
        ("*", ["*"]),
    ],
)
def test_conflicts_inside_of_only_halt(scope, rules):
    assert [str(rule) for rule in rules_of(scope)] == rules


@each("scope", ["", " , ", [], "GS1", "GS101:a.py:b:c", "a.py:12:13"])
def test_conflicts_outside_of_only_pass(scope):
    with pytest.raises(ValueError):
        rules_of(scope)
