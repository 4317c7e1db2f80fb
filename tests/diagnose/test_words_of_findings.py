"""A finding and a sentence as text: what ``print`` shows of them."""

import pytest
import torch

import gradsan
from gradsan.diagnose.failures import explain
from gradsan.model import Diagnosis, Failure, Frame, Label, Message, Site


def test_a_diagnosis_and_its_title_print_as_words(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    title = Message("title.result_overwritten", {"name": "h", "op": "sigmoid"})
    place = Label("written", Frame("model.py", 7, "forward", is_user=True), Message("label.leaf_written"))
    found = Diagnosis("GS101", "result_overwritten", "error", False, title, title, (place,))
    assert str(title) == "the result of sigmoid was overwritten in place, and its backward needs it"
    assert str(found).splitlines() == [f"gradsan: error[GS101]: {title}", "  overwritten: model.py:7"]


def test_an_operation_that_is_not_known_is_said_in_words():
    """A library's line of several operations: nothing tells which one PyTorch refused."""
    site = Site((Frame("train.py", 3, "<module>", is_user=True), Frame("/lib/normal.py", 9, "normalize")))
    values = {"broadcast": "[3, 8, 8]", "shape": "[1, 8, 8]"}
    found = explain(Failure("result_shape", "RuntimeError", "output with shape", site, values=values))
    assert found is not None
    assert str(found.title) == "the result of an operation does not fit into a value without a name"
    assert "?" not in str(found)


def test_two_findings_about_one_write_say_so():
    weight = torch.ones(3, requires_grad=True)
    with gradsan.watch() as watched:
        gate = torch.sigmoid(weight)
        gate.data.clamp_(max=0.5)
        (gate * gate).sum().backward()
    first, second = watched.diagnoses
    assert {first.code, second.code} == {"GS202", "GS215"}
    assert "note.same_write" not in [note.key for note in first.notes]
    [note] = [note for note in second.notes if note.key == "note.same_write"]
    assert note.values == {"code": first.code}


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_saves_its_weight_for_the_gradient_of_its_input(bias):
    layer = torch.nn.Linear(3, 2, bias=bias)
    hidden = torch.ones(4, 3, requires_grad=True).sin()
    with gradsan.watch() as watched:
        out = layer(hidden)
        layer.weight.data.mul_(2)
        out.sum().backward()
    saved = next(one for one in watched.diagnoses[0].labels if one.role == "saved")
    assert saved.message.values["target"] == "hidden"


def test_a_write_in_a_callback_is_to_come_after_the_backward():
    fit = {}
    exec(
        compile(
            "def run(net, callback):\n    loss = net(net(x))\n    callback(net)\n    loss.sum().backward()\n",
            "/lib/site-packages/trainer/loop.py",
            "exec",
        ),
        fit,
    )
    fit["x"] = torch.ones(4, 3)

    def clip(net):
        for parameter in net.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    net = torch.nn.Linear(3, 3)
    with gradsan.watch() as watched:
        fit["run"](net, clip)
    helps = [fix.summary.key for fix in watched.diagnoses[0].fixes]
    assert helps == ["help.update_after_backward", "help.recompute_forward"]


def test_a_cut_before_the_loss_comes_before_an_input_whose_gradient_is_looked_at():
    net, x = torch.nn.Linear(3, 2), torch.ones(4, 3)

    def train():
        out = net(x).detach()
        out.sum().backward()
        print(x.grad)

    with pytest.raises(RuntimeError, match="does not require grad"), gradsan.watch() as watched:
        train()
    assert watched.diagnoses[0].title.key == "title.loss_without_graph_cut"
