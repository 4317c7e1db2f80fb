"""Trainings that become nan in watch mode: noticed with the round, and which of the harmless ones are no finding."""

import runpy
import textwrap

import pytest
import torch
from value_programs import SETUP, training

import gradsan
from forked import call_forked

WEIGHT = """
weight = nn.Parameter(torch.tensor([1.0, 2.0]))
parameters = [weight]
"""
# name: (when the parameters were seen to be nan, steps before, program); each is followed by a training.
NOTICED = {
    "made by the forward of round 3": (
        "during",
        3,
        "loss_of = lambda batch: (weight - 9 * (batch == 3)).sqrt().sum()",
    ),
    "made by the backward of round 3": (
        "before",
        4,
        "loss_of = lambda batch: ((weight * (batch != 3)) ** 2).sum().sqrt()",
    ),
    "made by the last backward": ("after", 6, "loss_of = lambda batch: ((weight * (batch != 5)) ** 2).sum().sqrt()"),
    "written by hand": (
        "before",
        3,
        """
        def loss_of(batch):
            if batch == 3:
                with torch.no_grad():
                    weight[0] = float("nan")
            return weight.sum()
        """,
    ),
    "two optimizers, one of them spoilt": (
        "during",
        2,
        """
        other = nn.Parameter(torch.ones(2))
        torch.optim.SGD([other], lr=0.1)
        loss_of = lambda batch: (weight.sum() + other.sum()) * (float("nan") if batch == 2 else 1)
        """,
    ),
}
HARMLESS = {
    "a loss that is not finite, gradients that are": "loss_of = lambda batch: weight.sum() + float('inf')",
    "a mask of -inf among the parameters": """
        prior = nn.Parameter(torch.tensor([0.0, float("-inf")]))
        parameters = [weight, prior]
        loss_of = lambda batch: -(weight + prior).log_softmax(0)[0]
        """,
    "a parameter with nan that no loss uses": """
        table = nn.Parameter(torch.full((3,), float("nan")))
        parameters = [weight, table]
        loss_of = lambda batch: weight.sum()
        """,
    "rounds whose loss is nan are left out": """
        def loss_of(batch):
            loss = (weight - (9 if batch == 3 else 0)).log().sum()
            return loss if loss.isfinite() else weight.sum() * 0
        """,
    "a scaler that skips the step": """
        weight = nn.Parameter(torch.ones(2))
        parameters = []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
        half = torch.optim.SGD([weight], lr=0.01)
        for _ in range(4):
            half.zero_grad()
            scaler.scale((weight * 8).sum()).backward()
            scaler.step(half)
            scaler.update()
        parameters = [nn.Parameter(torch.ones(1))]
        loss_of = lambda batch: parameters[0].sum()
        """,
    "an input with nan whose gradient is wanted, in a round that takes no step": """
        from torch.nn.utils import clip_grad_norm_
        other = nn.Parameter(torch.ones(2))
        taken = torch.optim.SGD([other], lr=0.1)
        for value in (1.0, float("nan"), 1.0):
            image = torch.full((2,), value, requires_grad=True)
            (image * other).sum().backward()
            if clip_grad_norm_([other], 1.0).isfinite():
                taken.step()
            taken.zero_grad()
        loss_of = lambda batch: weight.sum()
        """,
    "an input with nan that is filled anew each round": """
        image = torch.ones(2, requires_grad=True)
        for value in (1.0, float("nan"), 1.0):
            with torch.no_grad():
                image.copy_(torch.full((2,), value))
            (image * weight.detach()).sum().backward()
        loss_of = lambda batch: weight.sum()
        """,
    "under torch.func": """
        from torch.func import grad, vmap
        def loss_of(batch):
            vmap(grad(lambda one: (one - 9).log()))(weight.detach())
            return weight.sum()
        """,
}


def run(program, tmp_path):
    source = SETUP + WEIGHT + textwrap.dedent(program) + training(6)
    file = tmp_path / "train.py"
    file.write_text(source, encoding="utf-8")
    with gradsan.watch() as watched:
        runpy.run_path(str(file))
    assert not watched.report.seen.blind_spots
    return [one for one in watched.diagnoses if one.code == "GS605"], next(
        n for n, line in enumerate(source.splitlines(), 1) if line.endswith("# noticed")
    )


@pytest.mark.parametrize("name", NOTICED)
def test_a_training_that_becomes_nan_is_noticed_once(name, tmp_path):
    when, steps, program = NOTICED[name]
    [found], line = call_forked(run, program, tmp_path)
    assert (found.code, found.severity, found.nonfinite.born) == ("GS605", "warning", "unknown")
    assert (found.nonfinite.why.key, found.nonfinite.round) == (f"why.nonfinite_seen_{when}", steps)
    lines = {label.role: label.frame.line for label in found.labels}
    assert lines == ({} if when == "after" else {"noticed": line}) | {"path": line + 1}
    assert "weight" in str(found.nonfinite.why.values) or when == "after"


def test_finite_parameters_give_no_finding(tmp_path):
    found = {name: call_forked(run, program, tmp_path)[0] for name, program in HARMLESS.items()}
    assert {name: [str(one) for one in all_of] for name, all_of in found.items() if all_of} == {}


def test_a_leaf_that_is_updated_by_hand_is_a_parameter():
    own = torch.zeros(2, requires_grad=True)
    with gradsan.watch() as watched:
        for _ in range(3):
            (gradient,) = torch.autograd.grad(own.square().sum(), own)
            with torch.no_grad():
                own.sub_(gradient / gradient.norm())
    (found,) = watched.diagnoses
    assert (found.code, found.nonfinite.why.key) == ("GS605", "why.nonfinite_seen_before")


def test_each_stretch_reports_its_own(tmp_path):
    with gradsan.watch() as outer:
        for _ in range(2):
            weight = torch.nn.Parameter(torch.tensor([0.0]))
            optimizer = torch.optim.SGD([weight], lr=0.1)
            with gradsan.watch("nonfinite") as inner:
                torch.sqrt(weight * weight).sum().backward()
                optimizer.step()
            assert [one.code for one in inner.diagnoses] == ["GS602"], "the search, and not the notice, too"
    assert {one.code for one in outer.diagnoses} == {"GS602"}
