"""The expression for an optimizer's parameters: its network's where the file shows that, else its groups."""

import ast

import pytest

from gradsan.source.rewrite.given import parameters_of
from gradsan.source.tree import read_source

GROUPS = '[p for group in {}.param_groups for p in group["params"]]'

SHOWN = {
    "list(net.parameters())": [
        "net = Net()\nopt = Adam(net.parameters(), lr=1)\nloss.backward()",
        "net = Net()\nopt = Adam(params=net.parameters())\ndef train():\n    loss.backward()",
        "def main(net):\n    opt = Adam(net.parameters())\n    for x in data:\n        loss.backward()",
        "net = Net()\ndef main():\n    opt = Adam(net.parameters())\n    loss.backward()",
    ],
    "list(agent.actor.parameters())": [
        "agent = Agent()\nopt = Adam(agent.actor.parameters())\nloss.backward()",
    ],
}
OF_SELF = """class Trainer:
    def __init__(self):
        self.net = Net()
        self.opt = Adam(self.net.parameters())

    def train(self):
        loss.backward()
"""
NOT_SHOWN = [
    "net = Net()\nopt = Adam(net.parameters())\nnet = wrap(net)\nloss.backward()",
    "net = Net()\nopt = Adam(net.parameters())\nopt.add_param_group(more)\nloss.backward()",
    "net = Net()\nopt = Adam([*net.parameters(), scale])\nloss.backward()",
    "net = Net()\nopt = Adam(filter(wanted, net.parameters()))\nloss.backward()",
    "net = Net()\nopt = Adam(net.parameters())\ndef train(opt, net):\n    loss.backward()",
    "net = Net()\nopt = Adam(net.parameters())\ndef train(net):\n    loss.backward()",
    "net = Net()\nopt = Adam(net.parameters())\ndef renew():\n    global net\n    net = Net()\nloss.backward()",
    "def made(net):\n    opt = Adam(net.parameters())\n    return opt\nopt = made(Net())\nloss.backward()",
    "opt = Adam(nets[0].parameters())\nloss.backward()",
    "opt = Adam(net_of(0).parameters())\nloss.backward()",
    "agent = Agent()\nopt = Adam(agent.actor.parameters())\nagent.actor = Net()\nloss.backward()",
    "loss.backward()",
]


def given(tmp_path, text, optimizer="opt"):
    file = tmp_path / "train.py"
    file.write_text(text)
    source = read_source(str(file))
    at = next(node for node in source.nodes if isinstance(node, ast.Attribute) and node.attr == "backward")
    return parameters_of(source, optimizer, at)


@pytest.mark.parametrize(("expected", "texts"), SHOWN.items())
def test_parameters_of_one_network(tmp_path, expected, texts):
    assert {text: given(tmp_path, text) for text in texts} == dict.fromkeys(texts, expected)


def test_parameters_of_a_network_held_by_self(tmp_path):
    assert given(tmp_path, OF_SELF, "self.opt") == "list(self.net.parameters())"
    other = OF_SELF.replace("    def train", "    def renew(self):\n        self.net = Net()\n\n    def train")
    assert given(tmp_path, other, "self.opt") == GROUPS.format("self.opt")
    elsewhere = OF_SELF.replace("    def train", "class Other:\n    def train")
    assert given(tmp_path, elsewhere, "self.opt") == GROUPS.format("self.opt")


def test_groups_where_the_file_shows_no_single_network(tmp_path):
    assert {text: given(tmp_path, text) for text in NOT_SHOWN} == dict.fromkeys(NOT_SHOWN, GROUPS.format("opt"))
