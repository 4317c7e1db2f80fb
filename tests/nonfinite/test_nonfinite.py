"""Programs in which NaN or Inf is made, each with the code, the round and the lines that gradsan is to name."""

import textwrap

import pytest
import torch
from harmful_values import HARMFUL
from value_programs import run, training

import gradsan
from forked import call_forked

HARMLESS = {
    "half precision overflows, and the step is skipped": """
        model = nn.Linear(4, 4)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(4):
            loss = model(torch.randn(3, 4)).square().mean() * 1e3
            model.zero_grad()
            scaler.scale(loss).backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            scaler.step(optimizer)
            scaler.update()
        parameters = list(model.parameters())
        def loss_of(batch):
            return model(torch.randn(3, 4)).square().mean()
        """,
    "a mask of -inf, and a minimum that begins at infinity": """
        scores = nn.Parameter(torch.randn(4, 4))
        mask = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
        best = torch.full((), float("inf"))
        parameters = [scores]
        def loss_of(batch):
            global best
            loss = scores.masked_fill(mask, float("-inf")).softmax(-1).pow(2).sum()
            best = torch.minimum(best, loss.detach())
            return loss
        """,
    "a logarithm for the log book, of which no gradient is asked": """
        weight = nn.Parameter(torch.tensor([1.0, 0.0]))
        parameters = [weight]
        def loss_of(batch):
            entropy = -(weight.detach() * weight.detach().log()).sum()
            return (weight - 1).pow(2).sum() + 0 * batch if entropy.isnan() else weight.sum()
        """,
    "targets that are missing, left out by their mask": """
        model = nn.Linear(2, 1)
        target = torch.tensor([[1.0], [float("nan")], [0.0]])
        parameters = list(model.parameters())
        def loss_of(batch):
            known = ~target.isnan()
            return (model(torch.ones(3, 2))[known] - target[known]).pow(2).mean()
        """,
    "a gradient that is cut off before the parameter": """
        weight = nn.Parameter(torch.tensor([4.0, 0.0]))
        parameters = [weight]
        def loss_of(batch):
            return weight.sqrt()[:1].sum() if batch < 0 else weight[weight > 0].sqrt().sum()
        """,
    "a huge value that becomes small again": """
        weight = nn.Parameter(torch.tensor([200.0]))
        parameters = [weight]
        def loss_of(batch):
            return (1 / (1 + torch.exp(weight.detach()))).sum() + weight.sum()
        """,
}


@pytest.mark.parametrize("name", HARMFUL)
def test_the_origin_is_named(name, tmp_path):
    code, number, trains, program = HARMFUL[name]
    found, lines = call_forked(run, textwrap.dedent(program) + (training() if trains else ""), tmp_path)
    assert [(one.code, one.nonfinite.round) for one in found] == [(code, number)]
    roles = {label.role: label.frame.line for label in found[0].labels}
    assert roles["origin"] == lines["origin"]
    if lines["noticed"] is not None:
        assert roles["noticed"] == lines["noticed"]
    assert found[0].nonfinite.why.key.startswith("why.nonfinite_")


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_is_no_finding(name, tmp_path):
    found, _ = call_forked(run, textwrap.dedent(HARMLESS[name]) + training(), tmp_path)
    assert found == ()


def test_where_anomaly_mode_stops_the_backward_the_origin_is_known():
    weight = torch.zeros(2, requires_grad=True)
    watched = gradsan.watch("nonfinite")
    with pytest.raises(RuntimeError, match="SqrtBackward0"), watched, torch.autograd.detect_anomaly(check_nan=True):
        torch.where(weight > 0, torch.sqrt(weight), 0.0).sum().backward()
    assert [one.code for one in watched.diagnoses] == ["GS414", "GS602"]
    assert watched.diagnoses[1].nonfinite.op == "sqrt"


def test_a_scaler_that_skips_every_step_is_no_finding():
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with gradsan.watch("nonfinite") as watched:
        for _ in range(3):
            scaler.scale((weight.half() * 300).sum().float()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert watched.diagnoses == ()
    assert torch.equal(weight, torch.ones(4)), "no step was taken"


def test_losses_gradients_and_random_numbers_are_those_of_the_plain_program():
    def train():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.GELU(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        return [one.detach().clone() for one in model.parameters()], torch.get_rng_state()

    (plain, state), (searched, state_searched) = train(), gradsan.watch("nonfinite")(train)()
    assert all(torch.equal(one, other) for one, other in zip(plain, searched, strict=True))
    assert torch.equal(state, state_searched)
    assert torch.exp(torch.ones(1)).grad_fn is None


def test_a_graph_longer_than_the_search_is_a_blind_spot(monkeypatch):
    from gradsan.detect.nonfinite import backward

    monkeypatch.setattr(backward, "NODES_WATCHED", 5)
    weight = torch.ones(1, requires_grad=True)
    with gradsan.watch("nonfinite") as watched:
        value = weight
        for _ in range(20):
            value = value * 1.5
        value.sum().backward()
    assert [spot.key for spot in watched.report.seen.blind_spots] == ["blind.nonfinite_long_graph"]
