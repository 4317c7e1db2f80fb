"""The operations that programs are made of: every in-place method of ``torch.Tensor``, and a choice of what computes.

Templates: ``{t}`` is the tensor that is written, ``{same}`` one of its shape, ``{small}`` one that broadcasts to it,
``{mask}``, ``{rows}`` … constants that fit. ``rank`` is how many dimensions ``{t}`` must have, None for any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class InPlace:
    """A write: ``call`` follows the tensor; ``result`` is what its elements become, by what does not write.

    ``first`` is a statement that goes before. ``is_recorded`` is False where autograd takes no notice even in grad
    mode: the operation has no derivative, and the gradient passes as if nothing had been written.
    """

    call: str
    result: str
    rank: tuple[int, ...] | None = None
    first: str = ""
    is_recorded: bool = True


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _method(call: str, rank: tuple[int, ...] | None = None) -> InPlace:
    """``mul_({same})`` and its out-of-place twin."""
    return InPlace("." + call, "{t}." + re.sub(r"^(\w+)_\(", r"\1(", call), rank)


def _comparison(name: str, other: str) -> InPlace:
    """``gt_({same})``: in place it hands a gradient of zeros to both sides, out of place it has none."""
    return InPlace(f".{name}_({other})", f"{{t}}.{name}({other}) + 0 * ({{t}} + {other})")


def _on_a_copy(call: str, rank: tuple[int, ...] | None = None) -> InPlace:
    """What has no out-of-place twin is done to a clone that nobody else sees."""
    return InPlace("." + call, "{t}.clone()." + call, rank)


def _fill(call: str, seed: int) -> InPlace:
    """Random numbers, the same ones each time; the old elements do not matter."""
    return InPlace(f".{call}", f"filled({{t}}, lambda t: t.{call}, {seed})", first=f"torch.manual_seed({seed}); ")


_UNARY = """abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh ceil
conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 lgamma log log10 log1p log2
logit nan_to_num neg negative rad2deg reciprocal relu round rsqrt sgn sigmoid sign sin sinc sinh sqrt square
tan tanh trunc"""

_BINARY = """add sub subtract mul multiply div divide true_divide pow float_power atan2 arctan2 hypot fmod remainder
copysign floor_divide heaviside nextafter xlogy ldexp"""
_COMPARISONS = "eq ne not_equal lt less le less_equal gt greater ge greater_equal"
_UNNOTICED = "logical_and logical_or logical_xor"

METHODS: tuple[InPlace, ...] = (
    *(_method(f"{name}_()") for name in _UNARY.split()),
    *(_method(f"{name}_({{same}})") for name in _BINARY.split()),
    *(_method(f"{name}_({{small}})") for name in ("add", "mul", "div", "sub", "pow")),
    *(_method(f"{name}_(1.5)") for name in ("add", "mul", "div", "sub", "pow", "fmod", "remainder")),
    *(_comparison(name, other) for name in _COMPARISONS.split() for other in ("{same}", "1.5")),
    _method("add_({same}, alpha=0.5)"),
    _method("add_({same}.sum())"),
    _method("mul_(1)"),
    *(replace(_method(f"{name}_({{same}})"), is_recorded=False) for name in _UNNOTICED.split()),
    replace(_method("logical_not_()"), is_recorded=False),
    _method("clamp_(0.3, 0.7)"),
    _method("clip_(0.3, 0.7)"),
    _method("clamp_({same}, None)"),
    _method("clamp_min_(0.5)"),
    _method("clamp_max_(0.5)"),
    _method("addcmul_({same}, {same}, value=0.5)"),
    _method("addcdiv_({same}, {same}, value=0.5)"),
    _method("lerp_({same}, 0.3)"),
    _method("lerp_({same}, {same})"),
    _method("polygamma_(1)"),
    _method("mvlgamma_(1)"),
    _method("igamma_({constant})"),
    _method("igammac_({constant})"),
    _method("tril_()", (2,)),
    _method("triu_(1)", (2,)),
    _method("cumsum_(0)", (1, 2)),
    _method("cumprod_(0)", (1, 2)),
    _method("renorm_(2, 0, 0.5)", (2,)),
    _method("masked_fill_({mask}, 0.4)"),
    _method("masked_fill_({mask}, {scalar})"),
    _method("masked_scatter_({mask}, {same})"),
    _method("index_fill_(0, {rows}, 0.4)", (1, 2)),
    _method("index_copy_(0, {all_rows}, {same})", (1, 2)),
    _method("index_add_(0, {all_rows}, {same}, alpha=2)", (1, 2)),
    _method("index_reduce_(0, {all_rows}, {same}, 'prod')", (1, 2)),
    _method("index_put_(({rows},), {scalar})", (1, 2)),
    _method("index_put_(({rows},), {scalar}, accumulate=True)", (1, 2)),
    _method("scatter_(0, {places}, {same})", (1, 2)),
    _method("scatter_(0, {places}, 0.4)", (1, 2)),
    _method("scatter_add_(0, {places}, {same})", (1, 2)),
    _method("scatter_reduce_(0, {places}, {same}, 'sum')", (1, 2)),
    _method("put_({one_place}, {scalar}.reshape(1))", (1, 2)),
    _method("addmm_({matrix}, {square})", (2,)),
    _method("addmv_({square}, {vector})", (1,)),
    _method("addr_({column}, {row})", (2,)),
    _method("baddbmm_({matrix}.unsqueeze(0), {square}.unsqueeze(0))", (3,)),
    _method("addbmm_({matrix}.unsqueeze(0), {square}.unsqueeze(0))", (2,)),
    _on_a_copy("fill_diagonal_(0.4)", (2,)),
    _on_a_copy("fill_(0.4)"),
    _on_a_copy("zero_()"),
    InPlace(".fill_({scalar})", "{scalar}.expand_as({t})"),
    InPlace(".copy_({same})", "{same}"),
    InPlace(".copy_({small})", "{small}.expand_as({t})"),
    *(
        _fill(call, seed)
        for seed, call in enumerate(
            (
                *("normal_()", "uniform_()", "bernoulli_(0.5)", "cauchy_()", "exponential_()"),
                *("geometric_(0.5)", "log_normal_()", "random_(0, 3)"),
            )
        )
    ),
)

STATEMENTS: tuple[InPlace, ...] = (
    InPlace(" += {same}", "{t} + {same}"),
    InPlace(" -= 0.1", "{t} - 0.1"),
    InPlace(" *= {small}", "{t} * {small}"),
    InPlace(" /= 1.5", "{t} / 1.5"),
    InPlace(" **= 2", "{t} ** 2"),
    InPlace(" //= 0.5", "{t} // 0.5"),
    InPlace(" %= 0.5", "{t} % 0.5"),
    InPlace("[...] = {same}", "{same}"),
    InPlace("[{mask}] = 0.4", "{t}.masked_fill({mask}, 0.4)"),
    InPlace("[0] = 0.4", "torch.cat([torch.full_like({t}[:1], 0.4), {t}[1:]])", (1, 2)),
    InPlace("[0] = {t}[0] * {scalar}", "torch.cat([{t}[:1] * {scalar}, {t}[1:]])", (1, 2)),
    InPlace("[1:] *= {scalar}", "torch.cat([{t}[:1], {t}[1:] * {scalar}])", (1, 2)),
    InPlace("[:, 0] = 0.4", "torch.cat([torch.full_like({t}[:, :1], 0.4), {t}[:, 1:]], 1)", (2,)),
)
"""Augmented assignments and assignments to elements."""

FUNCTIONS: tuple[InPlace, ...] = tuple(
    InPlace(call, result)
    for call, result in (
        ("torch.relu_({t})", "torch.relu({t})"),
        ("torch.sigmoid_({t})", "torch.sigmoid({t})"),
        ("F.relu({t}, inplace=True)", "F.relu({t})"),
        ("F.elu({t}, inplace=True)", "F.elu({t})"),
        ("F.selu({t}, inplace=True)", "F.selu({t})"),
        ("F.celu({t}, inplace=True)", "F.celu({t})"),
        ("F.leaky_relu({t}, 0.1, inplace=True)", "F.leaky_relu({t}, 0.1)"),
        ("F.silu({t}, inplace=True)", "F.silu({t})"),
        ("F.mish({t}, inplace=True)", "F.mish({t})"),
        ("F.hardtanh({t}, 0.3, 0.7, inplace=True)", "F.hardtanh({t}, 0.3, 0.7)"),
        ("F.hardswish({t}, inplace=True)", "F.hardswish({t})"),
        ("F.hardsigmoid({t}, inplace=True)", "F.hardsigmoid({t})"),
        ("F.relu6({t}, inplace=True)", "F.relu6({t})"),
        ("F.threshold({t}, 0.5, 0.1, inplace=True)", "F.threshold({t}, 0.5, 0.1)"),
        ("torch._foreach_mul_([{t}], 1.5)", "{t} * 1.5"),
        ("torch._foreach_exp_([{t}])", "{t}.exp()"),
        ("torch._foreach_add_([{t}], [{same}])", "{t} + {same}"),
        ("torch._foreach_sigmoid_([{t}])", "{t}.sigmoid()"),
    )
)
"""Functions that write their first argument."""

OUT: tuple[InPlace, ...] = tuple(
    InPlace(call, result)
    for call, result in (
        ("torch.exp({same}, out={t})", "torch.exp({same})"),
        ("torch.add({same}, {same}, out={t})", "torch.add({same}, {same})"),
        ("torch.mul({t}, 1.5, out={t})", "torch.mul({t}, 1.5)"),
        ("torch.where({mask}, {same}, {same}, out={t})", "torch.where({mask}, {same}, {same})"),
        ("torch.sigmoid({t}, out={t})", "torch.sigmoid({t})"),
    )
)
"""``out=``: PyTorch takes it only where nothing is recorded."""

# Why an in-place method of torch.Tensor is in none of the lists above.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "metadata only": _words(
        "as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ resize_as_ detach_ requires_grad_"
    ),
    "integers only": _words(
        "bitwise_and_ bitwise_or_ bitwise_xor_ bitwise_not_ bitwise_left_shift_ bitwise_right_shift_ gcd_ lcm_"
    ),
    "another layout": ("resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_"),
    "an alias rather than an operation": ("apply_", "map_", "map2_", "set_", "share_memory_"),
}

ALIASES: tuple[str, ...] = (
    "{t}.data",
    "{t}.detach()",
    "{t}.detach().view_as({t})",
    "torch.from_dlpack({t}.detach())",
    "copy.copy({t}.detach())",
    "torch.from_numpy({t}.detach().numpy())",
    "torch.empty(0, dtype=torch.float64).set_({t}.detach())",
    "torch.nn.Parameter({t}.data, requires_grad=False)",
)
"""Other names for the memory of a tensor, which writes go through."""

RAW: tuple[InPlace, ...] = tuple(
    InPlace(call, result)
    for call, result in (
        ("{t}.detach().numpy()[...] *= 1.5", "{t} * 1.5"),
        ("numpy.exp({t}.detach().numpy(), out={t}.detach().numpy())", "{t}.exp()"),
        ("{t}.detach().numpy().fill(0.4)", "torch.full_like({t}, 0.4)"),
        ("numpy.asarray({t}.detach())[...] += 0.25", "{t} + 0.25"),
        ("{t}.detach().apply_(lambda number: number * 0.5)", "{t} * 0.5"),
        ("{t}.detach().map_({t}.detach(), lambda one, other: one + other)", "{t} + {t}"),
        ("{t}.data.copy_({t}.data)", "{t}"),
    )
)
"""Writes that no version counter sees."""

UNARY = _words(
    "{0}.exp() {0}.sin() {0}.cos() {0}.tanh() {0}.sigmoid() {0}.sqrt() {0}.square() {0}.log1p() {0}.reciprocal() "
    "{0}.erf() {0}*2 {0}+1 -{0} {0}**3 1/{0} {0}.relu() {0}.abs() {0}.clamp(0.3,0.8) {0}.pow(1.5) {0}.cumsum(0) "
    "{0}.softmax(0) {0}.log_softmax(0) {0}.logsumexp(0) {0}.prod() {0}.max() {0}.norm() {0}.sum(0) {0}.mean() "
    "{0}.std() {0}.flip(0) F.softplus({0}) F.gelu({0}) F.elu({0}) F.leaky_relu({0}) F.layer_norm({0},{0}.shape[-1:]) "
    "{0}.sort(0)[0] {0}.clone() {0}.cumprod(0) {0}.expm1() {0}.atan() F.silu({0}) {0}.amax(0) {0}.roll(1) {0}.tril() "
    "{0}.var() {0}.sgn()"
)
BINARY = _words(
    "{0}*{1} {0}+{1} {0}-{1} {0}/{1} {0}.pow({1}) torch.atan2({0},{1}) torch.hypot({0},{1}) torch.maximum({0},{1}) "
    "torch.lerp({0},{1},0.3) torch.lerp({0},{1},{0}) torch.where({0}>{1},{0},{1}) F.mse_loss({0},{1}) "
    "torch.stack([{0},{1}]) torch.addcmul({0},{1},{0}) torch.addcdiv({0},{0},{1}) F.smooth_l1_loss({0},{1}) "
    "torch.cdist({0},{1}) F.cosine_similarity({0},{1},0) torch.xlogy({0},{1})"
)
PRODUCTS = ("{0} @ {1}.t()", "torch.mm({0}.t(), {1})", "torch.einsum('ij,kj->ik', {0}, {1})", "F.linear({0}, {1})")
"""Of two matrices of the same shape."""

VIEWS: dict[int, tuple[str, ...]] = {
    0: (".view(1)", ".unsqueeze(0)"),
    1: ("[1:]", "[:2]", "[::2]", "[0]", ".unsqueeze(0)", ".view(1, -1)", ".narrow(0, 1, 2)", ".view(-1, 2)"),
    2: (
        *(".t()", "[0]", "[:, 1]", "[1:]", "[:, :2]", ".view(-1)", ".diagonal()", ".transpose(0, 1)", ".select(1, 0)"),
        *(".unsqueeze(1)", ".permute(1, 0)", ".flatten()", "[..., ::2]", ".narrow(1, 0, 1)", ".reshape(-1, 2)"),
    ),
    3: (".squeeze(0)", "[0]", ".flatten()", ".transpose(1, 2)"),
}
