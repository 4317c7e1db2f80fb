"""Every curated formula, evaluated with what a real Node saved, gives what that Node computes; `reads` is true.

The Node itself is the judge: it is called with random output gradients in float64.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formula_cases import CASES, rows, t
from torch import Tensor

from cases import each
from gradsan.diagnose.needs import _formulas_of, _nodes, _written_by_hand, need_of

CURATED = [node for node in _written_by_hand() if node != "ops"]
# Nodes that only other devices create. They are `like` a Node that is checked here, and must save what it names.
ELSEWHERE = {
    "CudnnBatchNormBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductFlashAttentionBackward0",
}
# Slots read by value that the case at hand does not show, and why.
UNSHOWN = {
    ("NativeBatchNormBackward0", "running_mean"): "read in evaluation only; see test_running_statistics",
    ("NativeBatchNormBackward0", "running_var"): "read in evaluation only; see test_running_statistics",
}
# Slots read by value of which a tiny change may go unseen, and why.
COARSE = {
    ("FmodBackward1", "self"): "the quotient is rounded",
    ("FmodBackward1", "other"): "the quotient is rounded",
    ("RemainderBackward1", "self"): "the quotient is rounded",
    ("RemainderBackward1", "other"): "the quotient is rounded",
    ("LogSigmoidBackward0", "self"): "on CPU the value comes from the saved buffer",
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def node_of(outputs: Any, name: str) -> Any:
    waiting = [output.grad_fn for output in (outputs if isinstance(outputs, tuple) else (outputs,))]
    while waiting:
        node = waiting.pop()
        if node is not None and node.name() == name:
            return node
        waiting += [edge for edge, _ in node.next_functions] if node is not None else []
    raise AssertionError(f"no {name} in the graph")


def made(name: str) -> tuple[Any, list[Tensor | None]]:
    """A Node of that name and random gradients for its outputs."""
    node = node_of(CASES[name].run(), name)
    outputs = node._input_metadata[: len(CASES[name].returns)]
    grads = [torch.randn(meta.shape, dtype=meta.dtype) for meta in outputs]
    return node, grads + [None] * (len(node._input_metadata) - len(grads))


def computed(node: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    with torch.no_grad():
        result = node(*grads)
    return result if isinstance(result, tuple) else (result,)


def saved_values(node: Any) -> dict[str, Any]:
    found = (name.removeprefix("_saved_") for name in dir(node) if name.startswith("_saved_"))
    return {name: getattr(node, f"_saved_{name}") for name in found}


def of_numbers(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Tensor]:
    return lambda x: function(torch.as_tensor(x))


def evaluate(
    name: str,
    values: Mapping[str, Any],
    grads: list[Tensor | None],
    extra: Mapping[str, Any],
    returns: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The curated gradients of a Node, by input."""
    person = _formulas_of(name)
    space: dict[str, Any] = {**vars(torch), **vars(F), "pi": math.pi, "inf": math.inf}
    for function in ("log", "sqrt"):
        space[function] = of_numbers(getattr(torch, function))
    space |= {person.get("names", {}).get(slot, slot): value for slot, value in values.items()}
    space |= {"grad": grads[0], **extra}
    space |= {f"grad_{output}": grad for output, grad in zip(returns, grads, strict=False)}
    for key, text in person.get("let", {}).items():
        space[key] = eval(text, space)
    return {key.removeprefix("grad_"): eval(text, space) for key, text in person.items() if key.startswith("grad_")}


def test_every_curated_node_is_checked() -> None:
    assert set(CASES) | ELSEWHERE | set(TWINS) == set(CURATED)


@each("name", [name for name in CASES if any(key.startswith("grad_") for key in _formulas_of(name))])
def test_formula_gives_what_the_node_computes(name: str) -> None:
    case = CASES[name]
    node, grads = made(name)
    truth = dict(zip(_nodes()[name]["inputs"], computed(node, grads), strict=True))
    values = saved_values(node)
    if case.one_step:
        grads, truth, values = first_step(list(grads)), first_step(truth), first_step(values)
    with torch.no_grad():
        formulas = evaluate(name, values, grads, case.extra, case.returns)
    assert formulas
    for key, value in formulas.items():
        torch.testing.assert_close(value, truth[key], rtol=case.tolerance, atol=case.tolerance)


def first_step(values: Any) -> Any:
    """The same with the leading dimension, of length 1, taken off whatever has three."""
    if isinstance(values, dict):
        return {key: first_step(value) for key, value in values.items()}
    if isinstance(values, list):
        return [first_step(value) for value in values]
    return values.squeeze(0) if isinstance(values, Tensor) and values.dim() == 3 else values


def linear() -> tuple[dict[str, Tensor], Tensor]:
    values = {"input": t(2, 3), "weight": t(4, 3)}
    return values, F.linear(**values)


def rms_norm() -> tuple[dict[str, Tensor], Tensor]:
    x, weight = t(4, 5), t(5)
    rstd = x.pow(2).mean(-1, keepdim=True).rsqrt()
    return {"input": x, "weight": weight, "result1": rstd.detach()}, x * rstd * weight


# Operations with a Node of their own only on other devices: what that Node saves, and the same computed on the CPU.
TWINS = {"LinearBackward0": linear, "FusedRmsNormBackward0": rms_norm}


@each("name", sorted(TWINS))
def test_formula_gives_what_autograd_gives_for_the_same_mathematics(name: str) -> None:
    values, output = TWINS[name]()
    grad = torch.randn_like(output)
    formulas = evaluate(name, values, [grad], {"avg": rows})
    truth = torch.autograd.grad(output, [values[key] for key in formulas], grad)
    for value, expected in zip(formulas.values(), truth, strict=True):
        torch.testing.assert_close(value, expected)


@each("name", sorted(ELSEWHERE))
def test_a_node_of_another_device_saves_what_its_formulas_name(name: str) -> None:
    entry, person, twin = _nodes()[name], _formulas_of(name), _written_by_hand()[name]["like"]
    slots = {person.get("names", {}).get(slot, slot) for slot in entry["saved"]}
    texts = [*person["let"].values(), *(text for key, text in person.items() if key.startswith("grad_"))]
    named = {found.id for text in texts for found in ast.walk(ast.parse(text)) if isinstance(found, ast.Name)}
    twin_names = _formulas_of(twin).get("names", {})
    assert named & {twin_names.get(slot, slot) for slot in _nodes()[twin]["saved"]} <= slots


def tensors_in(node: Any, slot: str) -> list[Tensor]:
    raw = getattr(node, f"_raw_saved_{slot}")
    return [one.data for one in (raw if isinstance(raw, tuple) else (raw,)) if isinstance(one.data, Tensor)]


def rewrite(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad():
        tensor.data.copy_(change(tensor.detach().clone()))


def another(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return ~tensor
    if not tensor.is_floating_point():
        return (tensor + 1) % (tensor.max() + 1)
    return -1.7 * tensor + 0.31


def slightly_larger(tensor: Tensor) -> Tensor:
    return tensor * (1 + 1e-9 if tensor.dtype == torch.float64 else 1 + 1e-3)


def changes(name: str, slot: str, change: Callable[[Tensor], Tensor], *, create_graph: bool = False) -> bool:
    """Whether backward notices the change of that slot's values."""
    torch.manual_seed(1)
    node, grads = made(name)
    with torch.set_grad_enabled(create_graph):
        before = node(*grads)
        for tensor in tensors_in(node, slot):
            rewrite(tensor, change)
        try:
            after = node(*grads)
        except RuntimeError:
            return True
    pairs = zip(*(one if isinstance(one, tuple) else (one,) for one in (before, after)), strict=True)
    return not all(one is None or torch.equal(one, other) for one, other in pairs)


SLOTS = [(name, slot) for name in CASES for slot in _nodes()[name]["saved"]]


@each(("name", "slot"), [pair for pair in SLOTS if need_of(*pair).reads != "values"])
@each("create_graph", [False, True])
def test_slots_of_which_backward_does_not_read_the_values(name: str, slot: str, create_graph: bool) -> None:
    assert tensors_in(made(name)[0], slot)
    assert not changes(name, slot, slightly_larger, create_graph=create_graph)
    if name in ("NanToNumBackward0", "NansumBackward0"):
        assert changes(name, slot, lambda tensor: tensor.flip(0), create_graph=create_graph)
    else:
        assert changes(name, slot, another, create_graph=create_graph) == (need_of(name, slot).reads == "mask")


@each(("name", "slot"), [pair for pair in SLOTS if need_of(*pair).reads == "values" and need_of(*pair).curated])
def test_slots_of_which_backward_reads_the_values(name: str, slot: str) -> None:
    tensors = tensors_in(made(name)[0], slot)
    if not tensors:
        pytest.skip("this case saves nothing there")
    assert changes(name, slot, another) or changes(name, slot, another, create_graph=True) or (name, slot) in UNSHOWN
    if tensors[0].is_floating_point() and (name, slot) not in {**UNSHOWN, **COARSE}:
        assert changes(name, slot, slightly_larger) or changes(name, slot, slightly_larger, create_graph=True)


@each("slot", ["running_mean", "running_var"])
def test_running_statistics_are_read_in_evaluation(slot: str) -> None:
    torch.manual_seed(1)
    output = F.batch_norm(t(4, 5), torch.zeros(5), torch.ones(5), t(5), t(5), training=False)
    grads = [torch.randn(4, 5)]
    before = computed(output.grad_fn, grads)
    rewrite(tensors_in(output.grad_fn, slot)[0], lambda tensor: tensor + 0.5)
    assert not all(map(torch.equal, before, computed(output.grad_fn, grads)))
    assert need_of("NativeBatchNormBackward0", slot).reads == "values"
