"""Programs on which gradsan and the oracle once disagreed, and what is the matter with each."""

from __future__ import annotations

from statements import Backward, Compute, Gradients, Hook, Optimizer, Program, Replace, Step, Tensor, View, Write

PROGRAMS: dict[str, tuple[Program, str]] = {
    # Deep mode called every changed value an error; of abs() only the sign is read.
    "a value of which backward reads the sign": (
        (
            Tensor("a", (3,), 1, leaf=True),
            Compute("g", "a * 2"),
            Compute("j", "g.abs()"),
            Write("g.data.mul_(1.5)", (("g", "g.mul(1.5)"),), recorded=False),
            Backward("(j * values(5, 3)).sum()", ("a",)),
        ),
        "right",
    ),
    # It did not see that a saved tensor had been given other memory, and computed what PyTorch does not.
    "a leaf that was given other memory": (
        (
            Tensor("a", (2, 3), 190, leaf=True),
            Compute("f", "a.pow(1.5)"),
            Replace("a", "a * 1.5"),
            Backward("(f * values(363, 2, 3)).sum()", ("a",)),
        ),
        "wrong",
    ),
    # What had been told as a silent conflict was not told again when it stopped the program.
    "silent first, and stopped by it later": (
        (
            Tensor("a", (3, 3), 409, leaf=True),
            Compute("c", "a.amax(0)"),
            Compute("e", "c.cos()"),
            Write("copy.copy(c.detach()).clamp_max_(0.5)", (("c", "c.clamp_max(0.5)"),), recorded=False, no_grad=True),
            Backward("(e * values(640, 3)).sum() + (a * values(203, 3, 3)).sum()", ("a",)),
            Write("torch._foreach_mul_([c], 1.5)", (("c", "c * 1.5"),)),
            Backward("(e * values(511, 3)).sum()", ("a",)),
        ),
        "wrong and raises",
    ),
    # Gradients that only rounding tells apart were taken for wrong.
    "a difference of one rounding": (
        (
            Tensor("b", (2,), 949, leaf=True),
            Compute("c", "b.var()"),
            Write("numpy.asarray(b.detach())[...] += 0.25", (("b", "b + 0.25"),), recorded=False),
            Backward("(c * values(452)).sum()", ("b",)),
        ),
        "right",
    ),
    # The value is stale, and the gradient that needs it is not asked for.
    "gradients of other inputs than the leaf it harms": (
        (
            Tensor("a", (3,), 1, leaf=True),
            Tensor("b", (3,), 2, leaf=True),
            Compute("c", "a * b"),
            Write("a.data.mul_(2)", (("a", "a.mul(2)"),), recorded=False),
            Gradients("(c * values(3, 3)).sum()", ("a",)),
        ),
        "right",
    ),
    "a value that other bytes of the write leave as it was": (
        (
            Tensor("a", (4,), 1, leaf=True),
            Compute("b", "a * 2"),
            View("c", "b", "[:2]"),
            Compute("d", "c.sin()"),
            Write("b.data[2:].mul_(3)", (("b", "torch.cat([b[:2], b[2:] * 3])"),), recorded=False),
            Backward("(d * values(3, 2)).sum()", ("a",)),
        ),
        "right",
    ),
    "a fused step past a full overwrite": (
        (
            Tensor("a", (3,), 83, leaf=True),
            Tensor("b", (3,), 22, leaf=True),
            Backward("(a * values(138, 3)).sum()", ("a", "b")),
            Compute("d", "a.pow(2)"),
            Optimizer("optimizer", "SGD", ("a",), "lr=0.1, fused=True"),
            Step("optimizer"),
            Backward("(d * values(660, 3)).sum()", ("a", "b")),
        ),
        "wrong",
    ),
    # The hook is left out: einsum gives a view, and a view that is written loses its hooks.
    "a hook on what einsum gives": (
        (
            Tensor("a", (2, 3), 770, leaf=True),
            Tensor("b", (2, 3), 949, leaf=True),
            Compute("c", "torch.einsum('ij,kj->ik', a, b)"),
            Hook("c", 0.5),
            Write("F.mish(c, inplace=True)", (("c", "F.mish(c)"),)),
            Backward("(c * values(779, 2, 2)).sum()", ("a", "b"), retain=True),
        ),
        "right",
    ),
    # A comparison in place hands on zeros, which the derivative of hypot at 0 turns into NaN: no gradient to compare.
    "a comparison in place": (
        (
            Tensor("a", (3,), 322, leaf=True),
            Compute("g", "a - a"),
            Compute("i", "g.mean()"),
            Compute("k", "torch.hypot(i, i)"),
            Gradients("(g * values(204, 3)).sum()", ("a",), retain=True),
            Write("i.gt_(k)", (("i", "i.gt(k) + 0 * (i + k)"),)),
            Gradients("(i * values(908)).sum() + (g * values(204, 3)).sum()", ("a",), retain=True),
        ),
        "right",
    ),
    # Deep mode measured without the hook, and so the two ways to b cancelled each other out: right, it said.
    "ways that a hook keeps from cancelling out": (
        (
            Tensor("b", (), 650, leaf=True),
            Compute("f", "torch.addcdiv(b, b, b)"),
            Hook("f", 0.5),
            Compute("h", "F.mse_loss(f, b)"),
            Write("numpy.asarray(b.detach())[...] += 0.25", (("b", "b + 0.25"),), recorded=False),
            Backward("(h * values(583)).sum()", ("b",)),
        ),
        "wrong",
    ),
    # The gradient of a cosine similarity of a value with itself is 0, of which rounding makes another number each time.
    "a gradient that is mere rounding": (
        (
            Tensor("a", (2,), 487, leaf=True),
            Compute("d", "torch.atan2(a, values(749, 2))"),
            Backward("(d * values(932, 2)).sum()", ("a",), retain=True),
            Write("copy.copy(a.detach()).ldexp_(d)", (("a", "a.ldexp(d)"),), recorded=False, no_grad=True),
            Compute("g", "F.cosine_similarity(d, d, 0)"),
            Backward("(g * values(254)).sum()", ("a",)),
        ),
        "right",
    ),
}
