"""Pure diagnosis: evidence written by hand, a small source file, and the cause that follows. No torch is imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cases import each
from gradsan.diagnose import diagnose
from gradsan.model import Bridge, Conflict, Evidence, Frame, Name, Region, Save, Site, TensorInfo, Use, Write
from gradsan.text import say

SOURCE = """\
y = x.exp()
y += 1
opt.step()
loss.backward()
h = h_next
z = f(h)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


def at(file: str, line: int) -> Site:
    return Site((Frame(file, line, "<module>", is_user=True),))


WHOLE = Region(0, (4,), (1,), 4)


def conflict(file: str, **changes: object) -> Conflict:
    tensor = TensorInfo((4,), "float32", "cpu", 1, WHOLE, True, False)
    base = Conflict(
        save=Save(1, at(file, 1), tensor, 0, "ExpBackward0", "result", True, 5),
        writes=(Write(2, at(file, 2), "__iadd__", "inplace", 1, WHOLE, 6),),
        use=Use(3, at(file, 4), 1),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def code(found: Conflict) -> str:
    (diagnosis,) = diagnose(Evidence((found,)))
    return diagnosis.code


def test_a_written_result_is_gs101(file: str) -> None:
    (found,) = diagnose(Evidence((conflict(file),)))
    assert found.code == "GS101"
    assert found.severity == "error"
    assert [(label.role, label.frame.line) for label in found.labels] == [("saved", 1), ("written", 2), ("used", 4)]
    assert found.tensor is not None
    assert found.tensor.name == "y"


def test_a_written_operand_is_gs102(file: str) -> None:
    base = conflict(file)
    assert code(replace(base, save=replace(base.save, node="SinBackward0", slot="self", is_output=False))) == "GS102"


def test_a_write_from_a_layer_is_gs103(file: str) -> None:
    layer = Frame("/lib/site-packages/torch/nn/modules/activation.py", 9, "ReLU.forward")
    site = Site((*at(file, 2).frames, layer))
    write = replace(conflict(file).writes[0], site=site, op="relu_")
    assert code(conflict(file, writes=(write,))) == "GS103"


@each(
    ("function", "expected"),
    [
        ("def bent(x, bend):\n    y = relu(x)\n    y += bend\n    return y\n", "GS101"),
        ("def bent(x, inplace=False):\n    y = x.sigmoid()\n    return x.mul_(y) if inplace else x * y\n", "GS103"),
    ],
)
def test_a_write_from_a_library_is_gs103_only_where_it_can_be_asked_for(
    function: str, expected: str, tmp_path: Path
) -> None:
    library = tmp_path / "site-packages" / "zoo"
    library.mkdir(parents=True)
    (library / "act.py").write_text(function)
    (tmp_path / "train.py").write_text(SOURCE)
    file = str(tmp_path / "train.py")
    called = Frame("/lib/site-packages/torch/nn/modules/module.py", 1794, "Module._call_impl")
    site = Site((*at(file, 2).frames, called, Frame(str(library / "act.py"), 3, "bent")))
    write = replace(conflict(file).writes[0], site=site, op="add_")
    assert code(conflict(file, writes=(write,))) == expected


def test_a_leaf_without_gradient_is_gs105(file: str) -> None:
    base = conflict(file)
    data = replace(base.save.tensor, requires_grad=False, is_leaf=True)
    save = replace(base.save, tensor=data, node="MulBackward0", slot="other", is_output=False)
    assert code(replace(base, save=save)) == "GS105"


def step(file: str) -> Write:
    return Write(2, at(file, 3), "SGD.step", "step", 1, None, 6, is_parameter=True, optimizer="SGD", grad_enabled=False)


def test_a_step_is_gs110(file: str) -> None:
    assert code(conflict(file, writes=(step(file),), names=(Name("net.weight", "module", "parameter"),))) == "GS110"


def test_a_parameter_written_through_an_alias_is_gs110(file: str) -> None:
    names = (Name("net.weight", "module", "parameter"),)
    for recorded in (False, True):  # p.detach().copy_(q) is written where autograd records, and is no part of the graph
        write = replace(conflict(file).writes[0], op="copy_", grad_enabled=recorded)
        assert code(conflict(file, writes=(write,), names=names)) == "GS110"


def test_a_parameter_that_the_forward_writes_is_not_helped_by_another_forward(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def forward(a, b):\n    mask()\n    c = a @ w\n    mask()\n    return b @ w - c\nloss.backward()\n"
    )
    names = (Name("net.weight", "module", "parameter"),)
    write = replace(step(str(path)), op="mul_", kind="inplace", optimizer=None)

    def kinds(saved: Frame, written: Frame) -> list[str]:
        save = replace(conflict(str(path)).save, site=Site((saved,)))
        use = replace(conflict(str(path)).use, site=at(str(path), 6))
        found = conflict(str(path), save=save, writes=(replace(write, site=Site((written,))),), use=use, names=names)
        (diagnosis,) = diagnose(Evidence((found,)))
        assert diagnosis.code == "GS110"
        return [fix.kind for fix in diagnosis.fixes]

    inner, outer = Frame(str(path), 3, "forward", is_user=True), at(str(path), 6).frames[0]
    assert kinds(inner, replace(inner, line=4)) == ["update_between_forwards"]
    assert "update_between_forwards" not in kinds(inner, replace(outer, line=5))


def test_rows_shortened_by_an_embedding_are_no_flag_of_a_layer(file: str) -> None:
    layer = Frame("/lib/site-packages/torch/nn/functional.py", 9, "embedding")
    site = Site((*at(file, 2).frames, layer))
    write = replace(conflict(file).writes[0], site=site, op="embedding_renorm_")
    base = conflict(file, writes=(write,), names=(Name("lm.embed.weight", "module", "parameter"),))
    save = replace(base.save, node="MmBackward0", slot="mat2", is_output=False)
    (found,) = diagnose(Evidence((replace(base, save=save),)))
    assert found.code == "GS102"
    assert [note.key for note in found.notes] == ["note.max_norm_renormalises"]
    assert all(fix.lines for fix in found.fixes), "nobody has a line to write otherwise"


def test_a_layers_saved_value_does_not_take_the_name_of_the_argument(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("y = net(obs)\nswap()\ny.backward()\n")
    file = str(path)
    layer = Frame("/lib/site-packages/torch/nn/modules/conv.py", 9, "Conv1d.forward")
    chain = Frame("/lib/site-packages/torch/nn/modules/container.py", 9, "Sequential.forward")
    base = conflict(file, writes=(Write(2, at(file, 2), "data", "data", None, WHOLE, 6),))

    def name(slot: str, *inner: Frame) -> object:
        site = Site((*at(file, 1).frames, *inner))
        save = replace(base.save, site=site, node="ConvolutionBackward0", slot=slot, is_output=False)
        (found,) = diagnose(Evidence((replace(base, save=save),)))
        assert not any("obs" in text for fix in found.fixes for _, _, text in fix.lines) or slot == "input"
        assert found.tensor is not None
        return found.tensor.name

    assert name("input", layer) == "obs"
    assert name("weight", layer) != "obs"
    assert name("input", chain, layer) != "obs"


def test_a_tensor_with_history_does_not_take_the_name_of_a_detached_alias(file: str) -> None:
    base = conflict(file, writes=(), unexplained=1)
    save = replace(base.save, slot="self", is_output=False)
    names = (Name("fake", "variable", "value"), Name("grid", "variable", "data"))

    def name(requires_grad: bool) -> object:
        tensor = replace(save.tensor, requires_grad=requires_grad)
        (found,) = diagnose(Evidence((replace(base, save=replace(save, tensor=tensor), names=names),)))
        assert found.tensor is not None
        return found.tensor.name

    assert name(requires_grad=True) == "fake"
    assert name(requires_grad=False) == "grid"


def test_a_step_under_a_carried_state_is_gs111(file: str) -> None:
    bridge = Bridge("TanhBackward0", "MmBackward0", "h", (at(file, 6),), (at(file, 1),), forward_ran_again=True)
    base = conflict(file, writes=(step(file),), bridge=bridge)
    carried = replace(base, use=replace(base.use, retain_graph=True))
    assert code(carried) == "GS111"
    ran_once = replace(carried, bridge=replace(bridge, forward_ran_again=False))
    assert code(ran_once) == "GS110", "one forward used after a step is no carried state"


def test_statistics_are_gs112(file: str) -> None:
    base = conflict(file)
    save = replace(base.save, node="NativeBatchNormBackward0", slot="running_mean", is_output=False)
    assert code(replace(base, save=save)) == "GS112"


def test_a_write_to_other_bytes_is_a_false_alarm(file: str) -> None:
    beside = replace(conflict(file).writes[0], region=Region(4, (4,), (1,), 4))
    assert code(conflict(file, writes=(beside,))) == "GS120"
    assert code(conflict(file, writes=(beside,), unexplained=1)) != "GS120", "an unseen write may have hit it"


def test_no_logged_write_is_gs121(file: str) -> None:
    assert code(conflict(file, writes=(), unexplained=1)) == "GS121"


def test_a_conflict_under_the_programs_hooks_is_silent(file: str) -> None:
    (found,) = diagnose(Evidence((conflict(file, raised=False, under_user_hooks=True),)))
    assert found.code == "GS201"
    assert found.silent


def test_the_line_that_hands_out_memory_is_not_the_write(file: str) -> None:
    bypass = Write(2, at(file, 2), "numpy", "outside", None, None, 6)
    (found,) = diagnose(Evidence((conflict(file, writes=(bypass,), raised=False, bypass="memory_alias"),)))
    assert found.code == "GS203"
    assert [label.message.key for label in found.labels if label.role == "written"] == ["label.written.outside"]


def test_equal_findings_are_counted(file: str) -> None:
    (found,) = diagnose(Evidence((conflict(file), conflict(file))))
    assert found.count == 2


def test_a_formula_names_the_gradient_it_says_and_then_the_others(file: str) -> None:
    base = conflict(file)
    save = replace(base.save, node="MkldnnRnnLayerBackward0", slot="weight0", is_output=False)
    (found,) = diagnose(Evidence((replace(base, save=save),)))
    assert found.why is not None
    assert say(found.why.text, "en") == (
        "the gradient of lstm with respect to input is grad_input = d_gates @ weight_ih; it needs y as it was, "
        "and so do those with respect to weight_ih, weight_hh, h, c"
    )
    assert (
        say(found.labels[0].message, "en")
        == "saved: y, for the gradients with respect to lstm's input and 4 more inputs"
    )


COMPILED = """\
def train(model, x):
    out = model(x)
    out += 1
    return out.sum()
train(model, x).backward()
"""


def compiled_conflict(tmp_path: Path, *names: Name) -> Conflict:
    file = tmp_path / "compiled.py"
    file.write_text(COMPILED)
    outer = Frame(str(file), 5, "<module>", is_user=True)
    call = Frame(str(file), 2, "train", 11, 2, 19, is_user=True)
    entry = Frame("/lib/torch/_dynamo/eval_frame.py", 1166, "compile_wrapper")
    traced = Frame(str(file), 1, "forward", is_user=True)
    base = conflict(str(file))
    alias = replace(base.save.tensor, requires_grad=False, is_leaf=True)
    save = replace(
        base.save,
        site=Site((outer, call, entry, traced, replace(entry, line=1446))),
        tensor=alias,
        node="CompiledFunctionBackward",
        slot="saved_tensors[0]",
        is_output=False,
    )
    written = Site((outer, Frame(str(file), 3, "train", 5, 3, 13, is_user=True)))
    return replace(base, save=save, writes=(replace(base.writes[0], site=written),), names=names)


def test_the_result_of_a_compiled_function_is_gs101_at_its_call(tmp_path: Path) -> None:
    (found,) = diagnose(Evidence((compiled_conflict(tmp_path),)))
    assert found.code == "GS101"
    assert [(label.role, label.frame.line) for label in found.labels[:2]] == [("saved", 2), ("written", 3)]
    assert say(found.labels[0].message, "en") == "saved inside the compiled graph of model: out"
    assert "The compiled graph of model keeps its result out" in say(found.explanation, "en")
    assert "TORCH_COMPILE_DISABLE=1" in say(found.notes[0], "en")


def test_another_value_that_a_compiled_graph_saved_is_gs102(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").unlink(missing_ok=True)
    one = compiled_conflict(tmp_path, Name("hidden", "variable"))
    Path(one.save.site.frames[0].file).write_text(COMPILED.replace("out += 1", "hid += 1"))
    (found,) = diagnose(Evidence((one,)))
    assert found.code == "GS102"
    assert "saved hid" in say(found.explanation, "en")


def test_data_that_a_compiled_graph_saved_is_still_gs105(tmp_path: Path) -> None:
    (found,) = diagnose(Evidence((compiled_conflict(tmp_path, Name("mask", "variable", "data")),)))
    assert found.code == "GS105"


@each(
    ("line", "node", "slot", "target"),
    [
        ("h = torch.exp(x)", "ExpBackward0", "result", "x"),
        ("h = x.exp()", "ExpBackward0", "result", "x"),
        ("h = torch.exp(x + 1)", "ExpBackward0", "result", "exp's input"),
        ("h = a * b", "MulBackward0", "other", "a"),
        ("h = 2 / b", "MulBackward0", "other", "mul's first operand"),
        ("h = a @ b.t()", "MmBackward0", "self", "b"),
        ("h = F.linear(x, w, bias)", "AddmmBackward0", "mat1", "w"),
        ("h = block(x)", "AddmmBackward0", "mat1", "addmm's second operand"),
        ("h = F.conv2d(x, w)", "ConvolutionBackward0", "weight", "x"),
    ],
)
def test_a_label_has_the_words_of_the_line(tmp_path: Path, line: str, node: str, slot: str, target: str) -> None:
    file = tmp_path / "line.py"
    file.write_text(f"import torch\nimport torch.nn.functional as F\n{line}\n", encoding="utf-8")
    base = conflict(str(file))
    at = Frame(str(file), 3, "<module>", 5, 3, len(line) + 1, is_user=True)
    save = replace(base.save, node=node, slot=slot, is_output=slot == "result", site=Site((at,)))
    (found,) = diagnose(Evidence((replace(base, save=save),)))
    assert say(found.labels[0].message, "en").partition("with respect to ")[2].partition("   ")[0] == target
