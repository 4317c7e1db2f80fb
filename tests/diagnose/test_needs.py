"""The derived table is what the wheel says, it answers for whatever real graphs save, and reads well."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import each
from gradsan.diagnose import needs
from gradsan.diagnose.needs import need_of, op_name

ROOT = Path(__file__).resolve().parents[2]
TABLE = json.loads(Path(needs.__file__).with_name("needs.json").read_text(encoding="utf-8"))
same_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != TABLE["torch"],
    reason=f"needs.json describes torch {TABLE['torch']}, this is {torch.__version__}",
)


def generator() -> ModuleType:
    pytest.importorskip("yaml", reason="torchgen needs PyYAML")
    spec = importlib.util.spec_from_file_location("derive_needs", ROOT / "tools" / "derive_needs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@same_torch
def test_the_generator_reproduces_the_committed_file_and_reports_a_stale_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = generator()
    monkeypatch.setattr(module, "derive", functools.cache(module.derive))
    assert module.main(["--check"]) == 0
    monkeypatch.setattr(module, "OUTPUT", tmp_path / "needs.json")
    module.OUTPUT.write_text("{}", encoding="utf-8")
    assert module.main(["--check"]) == 1
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0


@same_torch
def test_slots_are_those_of_the_compiled_node_classes() -> None:
    classes = {name: value for name, value in vars(torch._C._functions).items() if isinstance(value, type)}
    compiled = {
        name: {slot.removeprefix("_raw_saved_") for slot in dir(value) if slot.startswith("_raw_saved_")}
        for name, value in classes.items()
    }
    compiled = {name: slots for name, slots in compiled.items() if slots}
    assert len(compiled) > 400
    assert {name: set(TABLE["nodes"][name].get("saved", ())) for name in compiled} == compiled


def t(*shape: int) -> Tensor:
    return torch.empty(shape).uniform_(0.2, 0.8).requires_grad_()


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


OPS: dict[str, Callable[[], Any]] = {
    "linear": lambda: F.linear(t(2, 3), t(4, 3), t(4)),
    "linear on sequences": lambda: F.linear(t(2, 5, 3), t(4, 3)),
    "einsum": lambda: torch.einsum("bij,bjk->bik", t(2, 3, 4), t(2, 4, 5)),
    "bilinear": lambda: F.bilinear(t(2, 3), t(2, 4), t(5, 3, 4)),
    "conv1d": lambda: F.conv1d(t(1, 2, 5), t(3, 2, 3)),
    "conv3d": lambda: F.conv3d(t(1, 2, 4, 4, 4), t(3, 2, 3, 3, 3)),
    "conv_transpose2d": lambda: F.conv_transpose2d(t(1, 2, 4, 4), t(2, 3, 3, 3)),
    "square": lambda: t(3).square(),
    "power of a tensor": lambda: t(3) ** t(3),
    "scalar to a tensor": lambda: 2 ** t(3),
    "scaling": lambda: t(3) * 3 / t(3),
    "copysign": lambda: torch.copysign(t(3), t(3)),
    "mul_": lambda: t(3).clone().mul_(t(3)),
    "exp_": lambda: t(3).clone().exp_(),
    "sigmoid_": lambda: t(3).clone().sigmoid_(),
    "relu inplace": lambda: F.relu(t(3).clone(), inplace=True),
    "rrelu": lambda: F.rrelu(t(3), training=True),
    "rrelu inplace": lambda: F.rrelu(t(3).clone(), training=True, inplace=True),
    "prelu": lambda: F.prelu(t(2, 3), t(3)),
    "gelu tanh": lambda: F.gelu(t(3), approximate="tanh"),
    "relu6": lambda: F.relu6(t(3)),
    "softsign": lambda: F.softsign(t(3)),
    "normalize": lambda: F.normalize(t(2, 3)),
    "dropout": lambda: F.dropout(t(9)),
    "gumbel_softmax": lambda: F.gumbel_softmax(t(2, 3)),
    "clamp from below": lambda: t(3).clamp(min=0.3),
    "index with a slice": lambda: t(4, 5)[:, ids(0, 2)],
    "index_put_": lambda: t(4).clone().index_put_((ids(0, 2),), t(2)),
    "setitem": lambda: setitem(),
    "masked setitem": lambda: masked_setitem(),
    "scatter_reduce": lambda: t(4).scatter_reduce(0, ids(0, 0, 1), t(3), "amax"),
    "index_reduce": lambda: t(4).index_reduce(0, ids(0, 1), t(2), "amax"),
    "put": lambda: t(4).put(ids(0, 2), t(2)),
    "take_along_dim": lambda: t(4).take_along_dim(ids(0, 2), 0),
    "embedding_bag": lambda: F.embedding_bag(ids(0, 2, 1), t(4, 3), ids(0, 2), mode="max"),
    "aminmax": lambda: tuple(torch.aminmax(t(4))),
    "var_mean": lambda: torch.var_mean(t(4)),
    "std_mean": lambda: torch.std_mean(t(4)),
    "norm": lambda: t(2, 3).norm() + t(4).norm(1),
    "renorm": lambda: t(2, 3).renorm(2, 0, 1.0),
    "pdist": lambda: F.pdist(t(4, 3)),
    "cosine_similarity": lambda: F.cosine_similarity(t(2, 3), t(2, 3)),
    "layer_norm": lambda: F.layer_norm(t(2, 3), (3,), t(3), t(3)),
    "group_norm": lambda: F.group_norm(t(2, 4, 3), 2, t(4), t(4)),
    "instance_norm": lambda: F.instance_norm(t(2, 3, 4)),
    "rms_norm": lambda: F.rms_norm(t(2, 3), (3,), t(3)),
    "batch_norm eval": lambda: F.batch_norm(t(4, 3), torch.zeros(3), torch.ones(3), t(3), t(3)),
    "local_response_norm": lambda: F.local_response_norm(t(1, 4, 5), 2),
    "cross_entropy": lambda: F.cross_entropy(t(2, 3), ids(0, 2), torch.ones(3)),
    "soft cross_entropy": lambda: F.cross_entropy(t(2, 3), torch.softmax(t(2, 3), 1)),
    "kl_div": lambda: F.kl_div(t(2, 3), t(2, 3), reduction="batchmean"),
    "weighted bce": lambda: F.binary_cross_entropy_with_logits(t(3), t(3), torch.ones(3), pos_weight=torch.ones(3)),
    "ctc_loss": lambda: F.ctc_loss(t(5, 1, 4).log_softmax(2), torch.tensor([[1, 2]]), ids(5), ids(2)),
    "triplet": lambda: F.triplet_margin_loss(t(2, 3), t(2, 3), t(2, 3)),
    "multi_margin": lambda: F.multi_margin_loss(t(2, 3), ids(0, 2)),
    "max_pool1d": lambda: F.max_pool1d(t(1, 2, 4), 2),
    "max_unpool2d": lambda: F.max_unpool2d(t(1, 1, 2, 2), torch.tensor([[[[0, 3], [9, 12]]]]), 2),
    "lp_pool": lambda: F.lp_pool2d(t(1, 1, 4, 4), 2, 2),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(t(1, 1, 5, 5), 2, 2),
    "grid_sample": lambda: F.grid_sample(t(1, 1, 4, 4), t(1, 3, 3, 2), align_corners=False),
    "attention": lambda: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8), is_causal=True),
    "attention with a mask": lambda: F.scaled_dot_product_attention(t(4, 8), t(4, 8), t(4, 8), t(4, 4)),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2)(t(3, 1, 8), t(3, 1, 8), t(3, 1, 8)),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16)(t(3, 1, 8)),
    "LSTM": lambda: nn.LSTM(3, 4, 2)(t(5, 1, 3))[0],
    "GRU": lambda: nn.GRU(3, 4)(t(5, 1, 3))[0],
    "RNN": lambda: nn.RNN(3, 4, bidirectional=True)(t(5, 1, 3))[0],
    "LSTMCell": lambda: nn.LSTMCell(3, 4)(t(1, 3)),
    "packed GRU": lambda: nn.GRU(3, 4)(nn.utils.rnn.pack_sequence([t(5, 3), t(2, 3)]))[0].data,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))(t(2, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))(t(2, 3)),
    "qr": lambda: tuple(torch.linalg.qr(t(3, 3))),
    "lu": lambda: tuple(torch.linalg.lu(t(3, 3))),
    "pinv": lambda: torch.linalg.pinv(t(3, 2)),
    "lstsq": lambda: torch.linalg.lstsq(t(4, 2), t(4, 1)).solution,
    "eig": lambda: tuple(torch.linalg.eig(t(3, 3))),
    "matrix_exp": lambda: torch.matrix_exp(t(3, 3)),
    "cholesky_solve": lambda: torch.cholesky_solve(t(3, 1), torch.eye(3).requires_grad_()),
    "fft": lambda: torch.fft.irfft(torch.fft.rfft(t(8)).exp()),
    "complex abs": lambda: torch.view_as_complex(t(3, 2)).abs(),
    "polar": lambda: torch.polar(t(3), t(3)),
    "special": lambda: torch.special.i1e(t(3)) + torch.special.erfcx(t(3)) + torch.special.ndtri(t(3)),
    "sparse": lambda: torch.sparse.mm(torch.eye(3).to_sparse().requires_grad_(), t(3, 2)),
    "double backward": lambda: torch.autograd.grad((t(3).sigmoid() * leaf()).tanh().sum(), leaf(), create_graph=True),
}

_LEAF = torch.full((3,), 0.5, requires_grad=True)


def leaf() -> Tensor:
    return _LEAF


def setitem() -> Tensor:
    x = t(4).clone()
    x[1:] = t(3).exp()
    return x


def masked_setitem() -> Tensor:
    x = t(4).clone()
    x[x > 0.5] = t()
    return x


def nodes_behind(outputs: Any) -> Iterator[Any]:
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    waiting = [one.grad_fn for one in tensors if isinstance(one, Tensor)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [edge for edge, _ in node.next_functions]


def filled_slots(node: Any) -> Iterator[tuple[str, list[Tensor]]]:
    for attribute in dir(node):
        if attribute.startswith("_raw_saved_"):
            raw = getattr(node, attribute)
            tensors = [one.data for one in (raw if isinstance(raw, tuple) else (raw,)) if isinstance(one.data, Tensor)]
            if tensors:
                yield attribute.removeprefix("_raw_saved_"), tensors


@each("op", OPS)
def test_every_saved_tensor_of_a_real_graph_has_a_need(op: str) -> None:
    torch.manual_seed(0)
    outputs = OPS[op]()
    slots = [(node.name(), slot) for node in nodes_behind(outputs) for slot, _ in filled_slots(node)]
    assert slots
    for node, slot in slots:
        need = need_of(node, slot)
        assert need is not None, (node, slot)
        assert need.formula
        assert need.gradient_of
        assert need.op


@each("op", [op for op in OPS if op not in ("setitem", "masked setitem")])
def test_a_saved_result_is_called_an_output(op: str) -> None:
    outputs = OPS[op]()
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        if isinstance(output, Tensor) and output.grad_fn is not None and output.layout == torch.strided:
            for slot, tensors in filled_slots(output.grad_fn):
                same = any(one.layout == torch.strided and one.data_ptr() == output.data_ptr() for one in tensors)
                assert not same or need_of(output.grad_fn.name(), slot).is_output


@each(
    ("node", "slot", "op", "formula", "gradient_of", "is_output", "reads"),
    [
        ("AddmmBackward0", "mat2", "addmm", "grad_mat1 = grad @ mat2.T", ("mat1",), False, "values"),
        (
            "SigmoidBackward0",
            "result",
            "sigmoid",
            "grad_self = grad * result * (1 - result)",
            ("self",),
            True,
            "values",
        ),
        ("ReluBackward0", "result", "relu", "grad_self = where(result > 0, grad, 0)", ("self",), True, "mask"),
        (
            "PowBackward1",
            "self",
            "pow",
            "grad_self = grad * exponent * self**(exponent - 1); grad_exponent = grad * result * log(self)",
            ("self", "exponent"),
            False,
            "values",
        ),
        (
            "NativeLayerNormBackward0",
            "weight",
            "layer_norm",
            "grad_input = rstd * (g - avg(g) - x_hat * avg(g * x_hat)); g = grad * weight",
            ("input",),
            False,
            "values",
        ),
        ("MkldnnRnnLayerBackward0", "weight1", "lstm", "grad_h = d_gates @ weight_hh", None, False, "values"),
        (
            "GatherBackward0",
            "self",
            "gather",
            "grad_self = zeros_like(self).scatter_add(dim, index, grad)",
            ("self",),
            False,
            "shape",
        ),
    ],
)
def test_formulas_as_people_write_them(
    node: str, slot: str, op: str, formula: str, gradient_of: tuple[str, ...] | None, is_output: bool, reads: str
) -> None:
    need = need_of(node, slot)
    assert need is not None
    assert need.curated
    assert (need.node, need.slot, need.op, need.formula) == (node, slot, op, formula)
    assert (need.is_output, need.reads) == (is_output, reads)
    assert gradient_of is None or need.gradient_of == gradient_of


@each(
    ("node", "slot", "shown", "others"),
    [
        ("MkldnnRnnLayerBackward0", "weight0", ("input",), ("weight_ih", "weight_hh", "h", "c")),
        ("CdistBackward0", "x1", ("x1",), ("x2",)),
        ("AddmmBackward0", "mat2", ("mat1",), ()),
        ("ConvTbcBackward0", "self", ("self", "weight", "bias"), ()),
    ],
)
def test_gradients_of_the_formula_are_separated_from_others(
    node: str, slot: str, shown: tuple[str, ...], others: tuple[str, ...]
) -> None:
    need = need_of(node, slot)
    assert need is not None
    assert need.shown == shown
    assert tuple(name for name in need.gradient_of if name not in need.shown) == others


def test_every_row_of_the_table_can_be_read() -> None:
    for node, entry in TABLE["nodes"].items():
        for slot in entry.get("saved", {}):
            need = need_of(node, slot)
            assert need is not None
            assert set(need.shown) <= set(need.gradient_of)
            assert all(f"grad_{name}" in need.formula for name in need.shown)


def test_an_operation_nobody_wrote_down_shows_pytorchs_own_formula() -> None:
    need = need_of("SincBackward0", "self")
    assert need is not None
    assert not need.curated
    assert need.formula == "grad_self = sinc_backward(grad, self)"


def test_foreach_nodes_are_found_by_their_graph_name() -> None:
    node = torch._foreach_mul([t(3)], [t(3)])[0].grad_fn
    assert op_name(node.name()) == "_foreach_mul"
    need = need_of(node.name(), "self")
    assert need is not None
    assert need.curated
    assert need.formula == "grad_other = grad * self"
    assert need.gradient_of == ("other",)
    lerp = need_of("ForeachLerpBackward1List", "self")
    assert lerp is not None
    assert not lerp.curated, "its operands have other names than those of lerp"


def test_foreach_addition_keeps_its_operands_for_their_dtype_only() -> None:
    x = t(3).exp()
    (total,) = torch._foreach_add([x], [t(3)])
    need = need_of(total.grad_fn.name(), "self")
    assert need is not None
    assert need.reads == "shape"
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.sum().backward()


def test_members_of_a_list_have_the_need_of_the_list() -> None:
    assert need_of("IndexBackward0", "indices[1]") == need_of("IndexBackward0", "indices")
    assert need_of("IndexBackward0", "indices") is not None


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_operations_missing_in_the_table_give_none() -> None:
    node = Twice.apply(t(3)).grad_fn
    assert op_name(node.name()) == "Twice"
    assert need_of(node.name(), "tensors") is None
    assert need_of("NotYetInventedBackward0", "self") is None
    assert need_of("AddmmBackward0", "mat1_sym_sizes") is None
    assert need_of("AddBackward0", "self") is None


@each(
    ("node", "op"),
    [
        ("AddmmBackward0", "addmm"),
        ("AddBackward0", "add"),
        ("NativeBatchNormBackward0", "batch_norm"),
        ("CudnnBatchNormBackward0", "batch_norm"),
        ("NllLossBackward0", "nll_loss"),
        ("LogSoftmaxBackward0", "log_softmax"),
        ("LogSigmoidBackward0", "logsigmoid"),
        ("LeakyReluBackward1", "leaky_relu"),
        ("MaxPool2DWithIndicesBackward0", "max_pool2d"),
        ("ScaledDotProductFlashAttentionForCpuBackward0", "scaled_dot_product_attention"),
        ("LinalgInvExBackward0", "linalg.inv"),
        ("FftR2CBackward0", "fft.rfft"),
        ("SumBackwardAutogradNestedTensor0", "sum"),
        ("NativeLayerNormBackwardBackward0", "layer_norm_backward"),
        ("torch::autograd::CopySlices", "copy_slices"),
        ("AccumulateGrad", "accumulate_grad"),
        ("FooBackward", "Foo"),
        ("NotYetInventedBackward0", "not_yet_invented"),
    ],
)
def test_operations_are_called_what_people_call_them(node: str, op: str) -> None:
    assert op_name(node) == op


def test_the_written_file_names_only_what_exists() -> None:
    people = dict(needs._written_by_hand())
    aliases = people.pop("ops")
    assert all(isinstance(alias, str) for alias in aliases.values())
    for node, own in people.items():
        entry, person = TABLE["nodes"][node], needs._formulas_of(node)
        gradients = {key for key in own if key.startswith("grad_")}
        assert own.keys() - gradients <= {"let", "names", "shape", "mask", "like"}, node
        assert {key.removeprefix("grad_") for key in person if key.startswith("grad_")} <= set(entry["inputs"]), node
        assert {*person.get("shape", ()), *person.get("mask", ())} <= set(entry["saved"]), node
        assert not {*person.get("shape", ())} & {*person.get("mask", ())}, node
        for text in [*own.get("let", {}).values(), *(own[key] for key in gradients)]:
            ast.parse(text, mode="eval")


def test_asking_imports_no_torch_and_reads_nothing_before() -> None:
    code = (
        "import sys; from gradsan.diagnose import needs; assert needs._nodes.cache_info().currsize == 0;"
        "assert needs.need_of('ExpBackward0', 'result').curated; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
