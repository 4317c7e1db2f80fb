"""For each Node with a curated formula, a program that creates it, in the plain case its formulas are written for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """`run` makes outputs whose graph holds the Node; `extra` are further names its formulas use.

    `returns` names the outputs that get a gradient, where there are several; `one_step` drops the leading dimension
    of layers over time, whose formulas are for one step.
    """

    run: Callable[[], Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    returns: tuple[str, ...] = ("result",)
    tolerance: float = 1e-9
    one_step: bool = False


def t(*shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    return torch.empty(shape).uniform_(low, high).requires_grad_()


def pos(*shape: int) -> Tensor:
    return t(*shape, low=0.3, high=0.9)


def ids(*values: Any) -> Tensor:
    return torch.tensor(values)


def elementwise(op: Callable[[Tensor], Tensor], make: Callable[..., Tensor] = t) -> Case:
    return Case(lambda: op(make(4, 5)))


def overwriting(op: Callable[[Tensor], Tensor]) -> Case:
    return Case(lambda: op(t(4, 5).clone()))


def two(op: Callable[[Tensor, Tensor], Tensor], make: Callable[..., Tensor] = t, **extra: Any) -> Case:
    return Case(lambda: op(make(4, 5), make(4, 5)), extra)


def spd() -> Tensor:
    a = torch.randn(3, 3)
    return (a @ a.T + 3 * torch.eye(3)).requires_grad_()


def lstm() -> Tensor:
    layer = torch.nn.LSTM(3, 4, dtype=torch.float32)
    state = tuple(torch.randn(1, 2, 4, dtype=torch.float32, requires_grad=True) for _ in range(2))
    return layer(torch.randn(1, 2, 3, dtype=torch.float32, requires_grad=True), state)[0]


def sdpa() -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*(t(1, 2, 4, 8) for _ in range(3)), scale=0.4)[0]


def rows(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def columns(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True)


def skew(x: Tensor) -> Tensor:
    return x - x.mT


BOOL = torch.tensor([[True, False, True, False, False], [False, True, True, False, True]] * 2)
INDEX = torch.tensor([[0, 1, 3, 2, 0], [2, 2, 1, 3, 3]])

CASES: dict[str, Case] = {
    "MmBackward0": Case(lambda: t(2, 3) @ t(3, 4)),
    "BmmBackward0": Case(lambda: t(2, 3, 4) @ t(2, 4, 5)),
    "AddmmBackward0": Case(lambda: F.linear(t(2, 3), t(4, 3), t(4))),
    "BaddbmmBackward0": Case(lambda: torch.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5))),
    "AddbmmBackward0": Case(lambda: torch.addbmm(t(3, 5), t(2, 3, 4), t(2, 4, 5))),
    "AddmvBackward0": Case(lambda: torch.addmv(t(3), t(3, 4), t(4))),
    "AddrBackward0": Case(lambda: torch.addr(t(3, 4), t(3), t(4))),
    "MvBackward0": Case(lambda: t(3, 4) @ t(4)),
    "DotBackward0": Case(lambda: t(4) @ t(4)),
    "ConvolutionBackward0": Case(
        lambda: F.conv2d(t(2, 3, 5, 5), t(4, 3, 3, 3), t(4)), {"conv": F.conv2d, "conv_transpose": F.conv_transpose2d}
    ),
    "MulBackward0": two(torch.mul),
    "DivBackward0": two(torch.div, pos),
    "PowBackward0": elementwise(lambda x: x**3),
    "PowBackward1": two(torch.pow, pos),
    "PowBackward2": elementwise(lambda x: 2.5**x),
    "FmodBackward1": two(torch.fmod, lambda *s: t(*s, low=1, high=9)),
    "RemainderBackward1": two(torch.remainder, lambda *s: t(*s, low=1, high=9)),
    "AddcmulBackward0": Case(lambda: torch.addcmul(t(4), t(4), t(4), value=0.7)),
    "AddcdivBackward0": Case(lambda: torch.addcdiv(t(4), t(4), pos(4), value=0.7)),
    "LerpBackward1": Case(lambda: torch.lerp(t(4), t(4), t(4))),
    "Atan2Backward0": two(torch.atan2),
    "HypotBackward0": two(torch.hypot),
    "XlogyBackward0": two(torch.xlogy, pos),
    "LogaddexpBackward0": two(torch.logaddexp),
    "LinalgCrossBackward0": Case(lambda: torch.linalg.cross(t(4, 3), t(4, 3), dim=1)),
    "AbsBackward0": elementwise(torch.abs),
    "ExpBackward0": elementwise(torch.exp),
    "Exp2Backward0": elementwise(torch.exp2),
    "Expm1Backward0": elementwise(torch.expm1),
    "LogBackward0": elementwise(torch.log, pos),
    "Log2Backward0": elementwise(torch.log2, pos),
    "Log10Backward0": elementwise(torch.log10, pos),
    "Log1PBackward0": elementwise(torch.log1p, pos),
    "LogitBackward0": elementwise(torch.logit, pos),
    "SqrtBackward0": elementwise(torch.sqrt, pos),
    "RsqrtBackward0": elementwise(torch.rsqrt, pos),
    "ReciprocalBackward0": elementwise(torch.reciprocal, pos),
    "SinBackward0": elementwise(torch.sin),
    "CosBackward0": elementwise(torch.cos),
    "TanBackward0": elementwise(torch.tan),
    "SinhBackward0": elementwise(torch.sinh),
    "CoshBackward0": elementwise(torch.cosh),
    "TanhBackward0": elementwise(torch.tanh),
    "AsinBackward0": elementwise(torch.asin, pos),
    "AcosBackward0": elementwise(torch.acos, pos),
    "AtanBackward0": elementwise(torch.atan),
    "AsinhBackward0": elementwise(torch.asinh),
    "AcoshBackward0": elementwise(torch.acosh, lambda *s: t(*s, low=1.1, high=3)),
    "AtanhBackward0": elementwise(torch.atanh, pos),
    "ErfBackward0": elementwise(torch.erf),
    "ErfcBackward0": elementwise(torch.erfc),
    "ErfinvBackward0": elementwise(torch.erfinv, pos),
    "LgammaBackward0": elementwise(torch.lgamma, pos),
    "DigammaBackward0": elementwise(torch.digamma, pos),
    "NanToNumBackward0": Case(
        lambda: torch.nan_to_num(t(3, 3).detach().where(~torch.eye(3, dtype=bool), math.inf).requires_grad_())
    ),
    "SigmoidBackward0": elementwise(torch.sigmoid),
    "ReluBackward0": overwriting(torch.relu_),
    "LeakyReluBackward0": elementwise(lambda x: F.leaky_relu(x, 0.1)),
    "LeakyReluBackward1": overwriting(lambda x: F.leaky_relu(x, 0.1, inplace=True)),
    "PreluKernelBackward0": two(torch.ops.aten._prelu_kernel),
    "EluBackward0": elementwise(F.selu),
    "EluBackward1": overwriting(lambda x: F.selu(x, inplace=True)),
    "CeluBackward0": elementwise(lambda x: F.celu(x, 0.5)),
    "CeluBackward1": overwriting(lambda x: F.celu(x, 0.5, inplace=True)),
    "GeluBackward0": elementwise(F.gelu),
    "SiluBackward0": elementwise(F.silu),
    "MishBackward0": elementwise(F.mish),
    "SoftplusBackward0": elementwise(lambda x: F.softplus(x, 1.5)),
    "LogSigmoidBackward0": elementwise(F.logsigmoid),
    "HardtanhBackward0": elementwise(F.hardtanh),
    "HardsigmoidBackward0": Case(lambda: F.hardsigmoid(t(4, 5, low=-5, high=5)), tolerance=1e-7),
    "HardswishBackward0": elementwise(F.hardswish, lambda *s: t(*s, low=-5, high=5)),
    "HardshrinkBackward0": elementwise(F.hardshrink),
    "SoftshrinkBackward0": elementwise(F.softshrink),
    "ThresholdBackward0": elementwise(lambda x: F.threshold(x, 0.2, 7.0)),
    "ThresholdBackward1": overwriting(lambda x: F.threshold(x, 0.2, 7.0, inplace=True)),
    "GluBackward0": Case(lambda: F.glu(t(4, 6), 1)),
    "NativeDropoutBackward0": Case(lambda: torch.native_dropout(t(4, 5), 0.3, True)[0]),
    "SoftmaxBackward0": elementwise(lambda x: x.softmax(1)),
    "SafeSoftmaxBackward0": elementwise(lambda x: torch.ops.aten._safe_softmax(x, 1)),
    "LogSoftmaxBackward0": elementwise(lambda x: x.log_softmax(1)),
    "LogsumexpBackward0": elementwise(lambda x: x.logsumexp(1, keepdim=True)),
    "MaximumBackward0": two(torch.maximum),
    "MinimumBackward0": two(torch.minimum),
    "FmaxBackward0": two(torch.fmax),
    "FminBackward0": two(torch.fmin),
    "ClampBackward0": Case(lambda: t(4, 5).clamp(t(4, 5, low=-2, high=-0.5), t(4, 5, low=0.5, high=2))),
    "ClampBackward1": elementwise(lambda x: x.clamp(-1, 1)),
    "ClampMinBackward0": elementwise(lambda x: torch.clamp_min(x, 0.1)),
    "ClampMinBackward1": two(torch.clamp_min),
    "ClampMaxBackward0": elementwise(lambda x: torch.clamp_max(x, 0.1)),
    "ClampMaxBackward1": two(torch.clamp_max),
    "WhereBackward0": two(lambda x, y: torch.where(BOOL.clone(), x, y)),
    "MaskedFillBackward0": elementwise(lambda x: x.masked_fill(BOOL.clone(), 1.5)),
    "MaskedFillBackward1": Case(lambda: t(4, 5).masked_fill(BOOL.clone(), t())),
    "MaskedScatterBackward0": Case(lambda: t(4, 5).masked_scatter(BOOL.clone(), t(int(BOOL.sum())))),
    "MaskedSelectBackward0": elementwise(lambda x: x[BOOL.clone()].sum() + x.masked_select(BOOL.clone())),
    "IndexBackward0": elementwise(lambda x: x[ids(0, 2, 2), ids(1, 4, 4)]),
    "UnsafeIndexBackward0": elementwise(lambda x: torch.ops.aten._unsafe_index(x, [ids(0, 2, 2), ids(1, 4, 4)])),
    "IndexPutBackward0": Case(lambda: t(4, 5).index_put((ids(0, 2), ids(1, 4)), t(2))),
    "IndexPutImplBackward0": Case(
        lambda: torch.ops.aten._index_put_impl_(t(4, 5).clone(), [ids(0, 2), ids(1, 4)], t(2))
    ),
    "IndexSelectBackward0": elementwise(lambda x: x.index_select(0, ids(0, 2, 2))),
    "IndexAddBackward0": Case(lambda: t(4, 5).index_add(0, ids(0, 2, 2), t(3, 5), alpha=0.7)),
    "IndexCopyBackward0": Case(lambda: t(4, 5).index_copy(0, ids(0, 2), t(2, 5))),
    "IndexFillBackward0": elementwise(lambda x: x.index_fill(0, ids(0, 2), 1.5)),
    "GatherBackward0": elementwise(lambda x: x.gather(0, INDEX.clone())),
    "ScatterBackward0": Case(lambda: t(4, 5).scatter(0, ids([0, 1, 3, 2, 0], [2, 2, 1, 3, 3]), t(2, 5))),
    "ScatterBackward1": elementwise(lambda x: x.scatter(0, INDEX.clone(), 1.5)),
    "ScatterAddBackward0": Case(lambda: t(4, 5).scatter_add(0, INDEX.clone(), t(2, 5))),
    "TakeBackward0": elementwise(lambda x: x.take(ids(0, 7, 7, 19))),
    "EmbeddingBackward0": Case(lambda: F.embedding(ids([0, 2, 2], [1, 0, 4]), t(6, 3))),
    "SortBackward0": elementwise(lambda x: x.sort(1)[0]),
    "SortBackward1": elementwise(lambda x: torch.sort(x, stable=True, dim=1)[0]),
    "TopkBackward0": elementwise(lambda x: x.topk(2, 1)[0]),
    "KthvalueBackward0": elementwise(lambda x: x.kthvalue(2, 1, True)[0]),
    "ModeBackward0": elementwise(lambda x: x.mode(1, True)[0]),
    "MaxBackward0": elementwise(lambda x: x.max(1, True)[0]),
    "MinBackward0": elementwise(lambda x: x.min(1, True)[0]),
    "MedianBackward1": elementwise(lambda x: x.median(1, True)[0]),
    "NanmedianBackward1": elementwise(lambda x: x.nanmedian(1, True)[0]),
    "MaxBackward1": elementwise(torch.max),
    "MinBackward1": elementwise(torch.min),
    "MedianBackward0": elementwise(torch.median),
    "NanmedianBackward0": elementwise(torch.nanmedian),
    "AmaxBackward0": elementwise(lambda x: x.amax(1, True)),
    "AminBackward0": elementwise(lambda x: x.amin(1, True)),
    "ProdBackward0": elementwise(torch.prod),
    "ProdBackward1": elementwise(lambda x: x.prod(1, True)),
    "NansumBackward0": Case(
        lambda: t(3, 3).detach().where(~torch.eye(3, dtype=bool), math.nan).requires_grad_().nansum()
    ),
    "VarBackward0": Case(lambda: t(4, 5).var(1, keepdim=True), {"n": 5}),
    "StdBackward0": Case(lambda: t(4, 5).std(1, keepdim=True), {"n": 5}),
    "LinalgVectorNormBackward0": elementwise(lambda x: torch.linalg.vector_norm(x, 3, 1, True)),
    "DistBackward0": two(torch.dist),
    "CdistBackward0": Case(lambda: torch.cdist(t(4, 3), t(5, 3))),
    "EuclideanDistBackward0": Case(lambda: torch.ops.aten._euclidean_dist(t(4, 3), t(5, 3))),
    "CumprodBackward0": elementwise(lambda x: x.cumprod(1)),
    "LogcumsumexpBackward0": elementwise(lambda x: x.logcumsumexp(1)),
    "CummaxBackward0": elementwise(lambda x: x.cummax(1)[0]),
    "CumminBackward0": elementwise(lambda x: x.cummin(1)[0]),
    "NativeLayerNormBackward0": Case(lambda: F.layer_norm(t(4, 5), (5,), t(5), t(5)), {"avg": rows}),
    "NativeGroupNormBackward0": Case(lambda: F.group_norm(t(4, 5), 1, t(5), t(5)), {"avg": rows}),
    "NativeBatchNormBackward0": Case(
        lambda: F.batch_norm(t(4, 5), torch.zeros(5), torch.ones(5), t(5), t(5), training=True), {"avg": columns}
    ),
    "WeightNormInterfaceBackward0": Case(lambda: torch._weight_norm(t(4, 5), pos(4, 1), 0)),
    "NllLossBackward0": Case(lambda: F.nll_loss(t(4, 5), ids(0, 3, 2, 1))),
    "NllLoss2DBackward0": Case(lambda: F.nll_loss(t(2, 4, 3, 3), torch.arange(18).remainder(4).view(2, 3, 3))),
    "MseLossBackward0": two(F.mse_loss, n=20),
    "SmoothL1LossBackward0": two(lambda x, y: F.smooth_l1_loss(x, y, beta=1.3), n=20),
    "HuberLossBackward0": two(lambda x, y: F.huber_loss(x, y, delta=1.3), n=20),
    "BinaryCrossEntropyBackward0": two(F.binary_cross_entropy, pos, n=20),
    "BinaryCrossEntropyWithLogitsBackward0": two(F.binary_cross_entropy_with_logits, n=20),
    "SoftMarginLossBackward0": Case(lambda: F.soft_margin_loss(t(4, 5), torch.where(BOOL, 1.0, -1.0)), {"n": 20}),
    "MaxPool2DWithIndicesBackward0": Case(lambda: F.max_pool2d(t(2, 3, 4, 4), 2)),
    "MaxPool3DWithIndicesBackward0": Case(lambda: F.max_pool3d(t(2, 3, 4, 4, 4), 2)),
    "AdaptiveMaxPool2DBackward0": Case(lambda: F.adaptive_max_pool2d(t(2, 3, 4, 4), 2)),
    "AdaptiveMaxPool3DBackward0": Case(lambda: F.adaptive_max_pool3d(t(2, 3, 4, 4, 4), 2)),
    "AvgPool2DBackward0": Case(lambda: F.avg_pool2d(t(2, 3, 4, 4), 2), {"n": 4}),
    "AvgPool3DBackward0": Case(lambda: F.avg_pool3d(t(2, 3, 4, 4, 4), 2), {"n": 8}),
    "AdaptiveAvgPool2DBackward0": Case(lambda: F.adaptive_avg_pool2d(t(2, 3, 4, 4), 2), {"n": 4}),
    "AdaptiveAvgPool3DBackward0": Case(lambda: F.adaptive_avg_pool3d(t(2, 3, 4, 4, 4), 2), {"n": 8}),
    "ReflectionPad1DBackward0": Case(lambda: F.pad(t(2, 3, 4), (1, 1), "reflect")),
    "ReflectionPad2DBackward0": Case(lambda: F.pad(t(2, 3, 4, 4), (1, 1, 1, 1), "reflect")),
    "ReflectionPad3DBackward0": Case(lambda: F.pad(t(2, 3, 4, 4, 4), (1, 1, 1, 1, 1, 1), "reflect")),
    "ReplicationPad1DBackward0": Case(lambda: F.pad(t(2, 3, 4), (1, 1), "replicate")),
    "ReplicationPad2DBackward0": Case(lambda: F.pad(t(2, 3, 4, 4), (1, 1, 1, 1), "replicate")),
    "ReplicationPad3DBackward0": Case(lambda: F.pad(t(2, 3, 4, 4, 4), (1, 1, 1, 1, 1, 1), "replicate")),
    "ScaledDotProductFlashAttentionForCpuBackward0": Case(sdpa),
    "MkldnnRnnLayerBackward0": Case(lstm, returns=("output", "h_n", "c_n"), tolerance=1e-5, one_step=True),
    "LinalgInvExBackward0": Case(lambda: torch.linalg.inv(spd())),
    "LinalgDetBackward0": Case(lambda: torch.linalg.det(spd())),
    "LinalgSlogdetBackward0": Case(lambda: torch.linalg.slogdet(spd())[1], returns=("sign", "logabsdet")),
    "LinalgSolveExBackward0": Case(lambda: torch.linalg.solve(spd(), t(3, 2))),
    "LinalgSolveTriangularBackward0": Case(lambda: torch.linalg.solve_triangular(spd(), t(3, 2), upper=True)),
    "LinalgCholeskyExBackward0": Case(lambda: torch.linalg.cholesky(spd())),
    "LinalgSvdBackward0": Case(lambda: torch.linalg.svd(t(3, 3))[1], {"skew": skew}, ("U", "S", "Vh")),
    "LinalgEighBackward0": Case(lambda: torch.linalg.eigh(spd())[0], {"skew": skew}, ("eigenvalues", "eigenvectors")),
    "FftR2CBackward0": elementwise(lambda x: torch.fft.rfft(x, dim=1)),
}
