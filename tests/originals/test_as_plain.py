"""Programs into which PyTorch's own machinery sees: in each mode they end as in plain PyTorch, and nothing is found."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gradsan
from cases import each
from gradsan import _torch
from gradsan._torch import memory

MODES = ["watch", "deep", "heal"]
DETACHED = "has been detached in-place"


def outcome(program):
    torch.manual_seed(0)
    try:
        return program()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def ctc_loss():
    outputs = torch.randn(12, 2, 5, dtype=torch.float64, requires_grad=True)
    labels, sizes = torch.randint(1, 5, (2, 4)), (torch.tensor([12, 11]), torch.tensor([4, 3]))
    nn.functional.ctc_loss(outputs.log_softmax(2), labels, *sizes).backward()
    return outputs.grad.tolist()


def ctc_loss_with_a_graph():
    outputs = torch.randn(12, 2, 5, requires_grad=True)
    loss = nn.functional.ctc_loss(outputs.log_softmax(2), torch.ones(2, 4).long(), *torch.tensor([[12, 12], [4, 3]]))
    [gradient] = torch.autograd.grad(loss, outputs, create_graph=True)
    return gradient.tolist(), outcome(lambda: gradient.sum().backward())


def ctc_loss_under_hooks():
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        return ctc_loss()


def chosen_checkpoint(saved):
    def policy(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x = torch.arange(4.0).requires_grad_()
    out = checkpoint(lambda t: (t.sin().abs() * t).cos().abs().sum(), x, use_reentrant=False, context_fn=contexts)
    out.backward()
    return x.grad.tolist()


class Operators(TorchDispatchMode):
    """Notes all operators but ``detach``, which PyTorch itself calls for saved tensors, with hooks and without."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.detach.default:
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Cubed(torch.autograd.Function):
    """Cubes; notes whether what was saved is handed out as the very objects."""

    @staticmethod
    def forward(ctx, x, factor):
        x.name = "x"
        result = x * x * x * factor
        ctx.save_for_backward(x, None, factor, result)
        ctx.given = x, None, factor
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, nothing, factor, result = ctx.saved_tensors
        Cubed.same = [one is another for one, another in zip(ctx.given, (x, nothing, factor), strict=True)]
        Cubed.same += [x.name, ctx.saved_tensors[3].requires_grad, (result == x**3 * factor).all().item()]
        return gradient * 3 * x * x * factor, None


def modes_around_training(mode):
    x = torch.arange(4.0).requires_grad_()
    with mode:
        for _ in range(2):
            y = (x.sin() * x).exp()
            Cubed.apply(y * y, torch.tensor(2.0)).sum().backward()
    return mode.seen


def nested():
    parts = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], requires_grad=True)
    torch.nested.to_padded_tensor(parts.sin() * parts, 0.0).sum().backward()
    return [one.tolist() for one in parts.grad.unbind()]


def nested_overwritten():
    parts = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(14, 3)], requires_grad=True) * 1.0
    product = parts * parts
    with torch.no_grad():
        parts.mul_(2)
    torch.nested.to_padded_tensor(product, 0.0).sum().backward()


def overwritten_on_meta():
    x = torch.randn(3, device="meta", requires_grad=True)
    y = x.exp()
    total = y.sum()
    with torch.no_grad():
        y.mul_(2)
    total.backward()


def on_meta():
    x = torch.randn(3, device="meta", requires_grad=True)
    (x.exp() * x).sum().backward()
    return x.grad.shape


def zeros_without_memory():
    a = torch.randn(3, requires_grad=True)
    gradient = torch._efficientzerotensor(3)
    return (a * gradient).sum().backward(), a.grad.tolist()


def without_elements():
    x = torch.randn(0, 3, requires_grad=True)
    (x.exp() @ torch.randn(3, 2)).sin().sum().backward()
    return x.grad.tolist(), x.grad.shape


def detached_in_place(also_written):
    a = torch.randn(3, requires_grad=True) * 1
    b = a.sin()
    a.detach_()
    if also_written:
        a.mul_(3)
    b.sum().backward()


def detached_after_a_function_saved_it():
    x = torch.ones(3, requires_grad=True)
    a = x * 2
    y = Cubed.apply(a, torch.tensor(2.0))
    a.detach_()
    y.sum().backward()
    return x.grad.tolist()


def nested_saved_where_memory_is_shared():
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], requires_grad=True)
    parts[0].detach().numpy()
    return outcome(lambda: parts[1].sum().backward())


def statistics_read_off_a_slot():
    layer = nn.BatchNorm1d(3)
    y = layer(torch.randn(4, 3))
    mean = y.grad_fn._saved_running_mean.tolist()
    y.sum().backward()
    return mean


def traced_backward():
    def function(t):
        return torch.autograd.grad(t.sin().exp().cos().sum(), t)[0]

    graph = make_fx(function)(torch.randn(3, requires_grad=True))
    return graph.code, graph(torch.ones(3, requires_grad=True)).tolist()


def traced_by_jit():
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Softmax(1))
    traced = torch.jit.trace(layers, torch.randn(2, 1, 5, 5))
    traced(torch.randn(2, 1, 5, 5)).pow(2).sum().backward()
    return [node.kind() for node in traced.inlined_graph.nodes()], [p.grad.tolist() for p in layers.parameters()]


def built_while_watching():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    with torch.no_grad():
        padded = layer(torch.randn(2, 4, 8), src_key_padding_mask=torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]).bool())
    return layer.activation_relu_or_gelu, padded.tolist()


def operand_overwritten():
    a = torch.randn(3, 2, requires_grad=True)
    first, second = torch.std_mean(a * 2, 1)
    product = second * first
    with torch.no_grad():
        second.mul_(2)
    product.sum().backward()


def very_objects(needs_grad):
    x = torch.randn(3, requires_grad=True)
    x = x * 1 if needs_grad else x.detach()
    factor = torch.tensor([2.0, 1.0, 4.0], requires_grad=True)
    Cubed.apply(x, factor).sum().backward()
    return Cubed.same


def hooks_of_a_slot():
    a, seen = torch.randn(3, requires_grad=True), []
    y = a.exp() * a
    slot = y.grad_fn._raw_saved_self
    slot.register_hooks(lambda t: seen.append("pack") or t * 2, lambda t: seen.append("unpack") or t / 2)
    again = outcome(lambda: slot.register_hooks(lambda t: t, lambda t: t))
    y.sum().backward()
    return seen, a.grad.tolist(), again


def hooks_that_write():
    y = torch.randn(3, requires_grad=True).sin()
    y.grad_fn._raw_saved_self.register_hooks(lambda t: t.mul_(2), lambda t: t)


def hooks_that_exit():
    y = torch.randn(3, requires_grad=True).sin()
    y.grad_fn._raw_saved_self.register_hooks(lambda t: t, lambda t: exit(3))
    y.sum().backward()


def no_hooks_for_a_slot_whose_node_is_gone():
    a = torch.randn(3, requires_grad=True)
    return outcome(lambda: a.exp().grad_fn._raw_saved_result.register_hooks(3, 4)).split("0x")[0]


def memory_after_hooks_of_a_slot():
    a = torch.randn(3, requires_grad=True) * 1
    there = weakref.ref(a.untyped_storage())
    y = a.sin()
    y.grad_fn._raw_saved_self.register_hooks(lambda t: t.tolist(), torch.tensor)
    del a
    gc.collect()
    return there() is None


AS_PLAIN = {
    "ctc_loss": ctc_loss,
    "ctc_loss_with_a_graph": ctc_loss_with_a_graph,
    "ctc_loss_under_hooks": ctc_loss_under_hooks,
    "chosen_checkpoint": lambda: chosen_checkpoint([torch.ops.aten.abs.default, torch.ops.aten.sum.default]),
    "operators": lambda: modes_around_training(Operators()),
    "functions": lambda: modes_around_training(Functions()),
    "nested": nested,
    "on_meta": on_meta,
    "without_elements": without_elements,
    "zeros_without_memory": zeros_without_memory,
    "very_objects": lambda: very_objects(False),
    "very_objects_with_grad": lambda: very_objects(True),
    "hooks_of_a_slot": hooks_of_a_slot,
    "hooks_that_write": hooks_that_write,
    "hooks_that_exit": hooks_that_exit,
    "detached_after_a_function_saved_it": detached_after_a_function_saved_it,
    "nested_saved_where_memory_is_shared": nested_saved_where_memory_is_shared,
    "statistics_read_off_a_slot": statistics_read_off_a_slot,
    "built_while_watching": built_while_watching,
    "traced_backward": traced_backward,
    "traced_by_jit": traced_by_jit,
    "no_hooks_for_a_slot_whose_node_is_gone": no_hooks_for_a_slot_whose_node_is_gone,
    "memory_after_hooks_of_a_slot": memory_after_hooks_of_a_slot,
}


@pytest.mark.parametrize("mode", MODES)
@each("name", AS_PLAIN)
def test_a_right_program_ends_as_it_does_in_plain_pytorch(name, mode):
    plain = outcome(AS_PLAIN[name])
    with gradsan.watch(mode) as watched:
        found = outcome(AS_PLAIN[name])
    assert found == plain
    assert not watched.diagnoses
    assert "blind.collect_failed" not in [spot.key for spot in watched.report.seen.blind_spots]


RAISED = {
    "nested_overwritten": (nested_overwritten, "GS102", True),
    "overwritten_on_meta": (overwritten_on_meta, "GS101", True),
    "operand_overwritten": (operand_overwritten, "GS102", False),
    "detached_in_place": (lambda: detached_in_place(False), "GS311", True),
    "detached_and_written": (lambda: detached_in_place(True), "GS311", True),
}


@pytest.mark.parametrize("mode", MODES)
@each("name", RAISED)
def test_an_error_of_pytorch_s_is_raised_in_its_words_and_explained(name, mode):
    program, code, also_healed = RAISED[name]
    plain = outcome(program)
    watched = gradsan.watch(mode)
    found = outcome(watched(program))
    assert plain.startswith("RuntimeError: ")
    if mode != "heal" or also_healed:
        assert found == plain
    assert [one.code for one in watched.diagnoses] == [code]


def test_a_kind_of_tensor_that_is_not_kept_is_named():
    with gradsan.watch("deep") as watched:
        nested()
    assert [spot.values for spot in watched.report.seen.blind_spots if spot.key == "blind.kind_not_kept"] == [
        {"kind": "nested"}
    ]


@pytest.mark.parametrize("program", [ctc_loss, ctc_loss_with_a_graph, without_elements])
def test_kernels_get_the_same_without_the_c_extension(program, monkeypatch):
    plain = outcome(program)
    monkeypatch.setattr(memory, "_lend", None)
    with gradsan.watch("heal") as watched:
        assert outcome(program) == plain
    assert not watched.diagnoses


def transposed():
    return torch.arange(12.0).reshape(3, 4)[1:].t()


@each("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_memory_given_to_kernels_is_the_saved_one_and_outlives_what_it_stands_for(dtype):
    saved = transposed().to(dtype).t()
    clone = _torch.lazy_clone(saved)
    with torch.no_grad():
        given = _torch.without_sharing(saved, clone)
    assert (given.dtype, given.shape, given.stride()) == (saved.dtype, saved.shape, saved.stride())
    assert given.data_ptr() == saved.const_data_ptr()
    bits = given.view(torch.uint8) if dtype.itemsize == 1 else given.view(torch.int16)
    before = bits.clone()
    place = weakref.ref(saved.untyped_storage())
    saved.zero_()
    del saved, clone
    gc.collect()
    assert place() is None
    assert torch.equal(bits, before)


def test_a_graph_made_in_backward_keeps_the_memory_of_the_program():
    with gradsan.watch("deep") as watched:
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        y = x * 1
        [gradient] = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match=r"is at version 1; expected version 0"):
            gradient.sum().backward()
    assert len(watched.diagnoses) == 1


def test_nothing_is_left_of_what_was_handed_to_kernels():
    with gradsan.watch("deep"):
        x = torch.randn(3, requires_grad=True)
        [gradient] = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=True)
        gradient.sum().backward()
    x.grad = None
    del gradient
    gc.collect()
    assert not memory._held
    assert not memory.lent_storages
