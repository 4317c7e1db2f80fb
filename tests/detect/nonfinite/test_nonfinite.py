"""Programs in which NaN or Inf is made, each with the code, the round and the lines that gradsan is to name."""

import sys
import textwrap

import pytest
import torch
from harmful_values import HARMFUL
from value_programs import run, training

import gradsan
from forked import call_forked
from gradsan.graph import naming

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
    "memory that was given back for a while, as sharded training does": """
        flat = torch.ones(8)
        weight = nn.Parameter(torch.ones(4))
        parameters = [weight]
        def loss_of(batch):
            part = flat[4:]
            flat.untyped_storage().resize_(0)
            part.requires_grad_()
            flat.untyped_storage().resize_(32)
            flat.fill_(1.0)
            return (part.detach() * weight).sum()
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
def test_harmless_values_are_no_finding(name, tmp_path):
    found, _ = call_forked(run, textwrap.dedent(HARMLESS[name]) + training(), tmp_path)
    assert found == ()


def test_the_origin_is_known_where_anomaly_mode_stops_the_backward():
    weight = torch.zeros(2, requires_grad=True)
    watched = gradsan.watch("nonfinite")
    with pytest.raises(RuntimeError, match="SqrtBackward0"), watched, torch.autograd.detect_anomaly(check_nan=True):
        torch.where(weight > 0, torch.sqrt(weight), 0.0).sum().backward()
    assert [one.code for one in watched.diagnoses] == ["GS414", "GS602"]
    assert watched.diagnoses[1].nonfinite.op == "sqrt"


def test_a_sum_of_products_that_half_precision_cannot_hold_has_no_singular_point():
    weight = torch.ones(3, 3, dtype=torch.float16, requires_grad=True)
    with gradsan.watch("nonfinite") as watched:
        (torch.full((5, 3), 200.0, dtype=torch.float16) @ weight).float().pow(2).sum().backward()
    (found,) = watched.diagnoses
    assert (found.code, found.nonfinite.op) == ("GS602", "mm")
    assert found.nonfinite.why.key == "why.nonfinite_gradient_overflow"
    assert [fix.kind for fix in found.fixes] == ["nonfinite_gradient"]


def test_a_line_that_met_infinity_in_one_operand_before_names_the_other():
    weight = torch.ones(2, requires_grad=True)
    start = torch.tensor([0.0, 1.0])
    with gradsan.watch("nonfinite") as watched:
        for top, low in ((start / 0.0, torch.ones(2)), (weight * start, weight * start)):
            ratio = top / low
        ratio.sum().backward()
    (found,) = watched.diagnoses
    assert "low[0]" in found.nonfinite.why.values.values()


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
    from gradsan.graph import walk

    monkeypatch.setattr(walk, "NODES_WALKED", 5)
    weight = torch.ones(1, requires_grad=True)
    with gradsan.watch("nonfinite") as watched:
        value = weight
        for _ in range(20):
            value = value * 1.5
        value.sum().backward()
    assert [spot.key for spot in watched.report.seen.blind_spots] == ["blind.nonfinite_long_graph"]


def gradients_of(loss_of):
    weights = torch.linspace(0.1, 0.8, 4).requires_grad_()
    loss_of(weights).backward()
    return weights.grad


WITHOUT_MEMORY = {
    "zeros of an unused tangent": lambda weights: (weights * torch._efficientzerotensor((4,))).sum() + weights.sum(),
    "second derivatives that are zero": lambda weights: (
        torch.func.hessian(lambda x: (weights * x).sum())(torch.ones(4)).sum() + weights.prod()
    ),
    "gradients of a batch, by transforms": lambda weights: torch.func.vmap(
        torch.func.grad(lambda x: (weights * x).sin().sum())
    )(torch.ones(3, 4)).sum(),
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_tensors_without_memory_are_left_alone(name):
    plain = gradients_of(WITHOUT_MEMORY[name])
    with gradsan.watch("nonfinite") as watched:
        searched = gradients_of(WITHOUT_MEMORY[name])
    assert torch.equal(plain, searched)
    assert watched.diagnoses == ()
    assert {spot.key for spot in watched.report.seen.blind_spots} <= {"blind.nonfinite_transformed"}


def compiled_backward():
    from torch._dynamo import compiled_autograd

    compiled = []

    def train():
        x = torch.ones(3, requires_grad=True)
        with compiled_autograd._enable(
            lambda graph: compiled.append([str(node) for node in graph.graph.nodes]) or graph
        ):
            (x.sin() * x).sum().backward()

    train()
    compiled_autograd.reset()
    with gradsan.watch("nonfinite") as watched:
        train()
    return compiled, [spot.key for spot in watched.report.seen.blind_spots]


def test_a_backward_that_is_compiled_is_left_alone():
    (plain, watched), blind_spots = call_forked(compiled_backward, compiles=True)
    assert watched == plain
    assert blind_spots == ["blind.nonfinite_compiled_backward"]


def test_a_look_that_fails_is_a_blind_spot(monkeypatch):
    from gradsan.detect.nonfinite import backward

    def failing(*_):
        raise ValueError("no such look")

    weight = torch.zeros(1, requires_grad=True)
    with gradsan.watch("nonfinite") as watched:
        loss = weight.sqrt().sum()
        monkeypatch.setattr(backward, "_values_kept", failing)
        loss.backward()
    assert weight.grad.isinf().all()
    assert [spot.key for spot in watched.report.seen.blind_spots] == ["blind.collect_failed"]


def divided(weights):
    parts, whole = weights * 2, weights - weights.detach()
    return (parts / whole).sum()


def divided_by_nameless(weights):
    parts = weights * 2
    return (parts / (weights - weights.detach())).sum()


def inverse(weights):
    return (1.0 / (weights - weights.detach())).sum()


def divided_in_place(weights):
    parts = weights * 2
    parts /= weights.detach().floor()
    return parts.sum()


def divided_by_a_number(weights):
    count = len([one for one in weights.tolist() if one > 2])
    return (weights / count).sum()


def power_of_ten(weights):
    return torch.pow(10.0, 60 * weights).sum()


def surprise(weights):
    certain = weights.detach() / weights
    return -torch.log(1 - certain).sum()


def distance(weights):
    offsets = weights - weights.detach()
    return offsets.square().sum().sqrt()


def masked_by_a_product(weights):
    scores = weights + torch.tensor([0.0, 0.0, 0.0, float("-inf")])
    return (scores * torch.tensor([1.0, 1.0, 1.0, 0.0])).exp().sum()


def summed_past_the_type(weights):
    rows = (weights.detach() + 1e20).reshape(1, 4)
    layer = torch.stack([weights + 1e20, weights - 2e20], 0)
    return torch.nn.functional.linear(rows, layer[:1] * torch.tensor([1.0, -1.0, 1.0, -1.0])).sum()


SAID = {
    divided: ("title.nonfinite_forward", "why.nonfinite_zero_division", "whole[0]"),
    divided_by_nameless: ("title.nonfinite_forward", "why.nonfinite_zero_division", "(weights - weights.detach())[0]"),
    inverse: ("title.nonfinite_forward", "why.nonfinite_zero_division", "(weights - weights.detach())[0]"),
    divided_in_place: ("title.nonfinite_forward", "why.nonfinite_zero_division", "weights.detach().floor()[0]"),
    divided_by_a_number: ("title.nonfinite_forward", "why.nonfinite_zero_division", "0.0"),
    power_of_ten: ("title.nonfinite_forward", "why.nonfinite_overflow", "(60 * weights)[3]"),
    surprise: ("title.nonfinite_forward", "why.nonfinite_domain", "(1 - certain)[0]"),
    distance: ("title.nonfinite_backward", "why.nonfinite_infinite_derivative", "offsets.square().sum()"),
    masked_by_a_product: ("title.nonfinite_forward_infinite", "why.nonfinite_infinite_operand", "scores[3]"),
    summed_past_the_type: ("title.nonfinite_forward", "why.nonfinite_overflow_sums", "rows"),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the columns of an operation, which Python knows since 3.11")
@pytest.mark.parametrize("loss_of", SAID, ids=lambda one: one.__name__)
def test_the_operand_that_decided_has_its_own_name(loss_of):
    weights = torch.linspace(0.1, 0.8, 4).requires_grad_()
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with gradsan.watch("nonfinite") as watched:
        loss_of(weights).backward()
        optimizer.step()
    (found,) = watched.diagnoses
    why = found.nonfinite.why
    assert (found.title.key, why.key, why.values["operand"]) == SAID[loss_of]


def test_memory_is_not_asked_for_where_a_mode_or_a_trace_would_see_it():
    class Listening(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            heard.append(function)
            return function(*args, **(kwargs or {}))

    look = pytest.importorskip("gradsan.record._native").holds_nonfinite
    heard, seen = [], []
    one = torch.full((2,), float("nan"))
    with Listening():
        seen.append(look(one))
    traced = torch.jit.trace(lambda x: (seen.append(look(x)), x + 1)[1], torch.ones(2), check_trace=False)
    assert (heard, seen) == ([], [None, None])
    assert "size" not in str(traced.inlined_graph)
    assert look(one) is True


def test_no_heap_is_walked_while_all_is_finite(monkeypatch):
    # Losses without a name that are read in every round, by gradsan itself and by the program.
    walks = []
    alive = naming.modules_alive
    monkeypatch.setattr(naming, "modules_alive", lambda *wanted: walks.append(wanted) or alive(*wanted))
    weights, total = torch.ones(3, requires_grad=True), 0.0
    with gradsan.watch("nonfinite") as watched:
        for _ in range(12):
            (weights.exp() * weights).sum().backward()
            total += (weights * 2).sum().item()
    assert (watched.diagnoses, walks) == ((), [])
