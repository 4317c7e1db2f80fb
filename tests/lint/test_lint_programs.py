"""Programs in the style of users, each with a fault at the lines that are marked, and their right twins."""

from __future__ import annotations

import re
from pathlib import Path

from cases import each
from gradsan.lint import check
from gradsan.text import codes, page

HERE = Path(__file__).parent
FAULTY = sorted((HERE / "faulty").glob("*.py"))


def found(source: str, file: str = "example.py") -> list[tuple[int, str]]:
    return [(one.at.line, one.code) for one in check(source.encode(), file).findings]


def possible(source: str) -> list[tuple[int, str]]:
    findings = check(source.encode(), "example.py", maybe=True).findings
    return [(one.at.line, one.code) for one in findings if not one.is_sure]


@each("file", FAULTY, ids=lambda file: file.stem)
def test_the_fault_is_found_and_the_right_twin_is_quiet(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    rows = list(enumerate(source.split("\n"), 1))
    marked = [(line, mark[1]) for line, row in rows if (mark := re.search(r"# (GS\d{3})$", row))]
    maybe = {(line, mark[1]) for line, row in rows if (mark := re.search(r"# (GS\d{3}) \(maybe\)$", row))}
    assert marked or maybe
    assert found(source) == marked
    assert maybe <= set(possible(source))
    assert found((HERE / "right" / file.name).read_text(encoding="utf-8")) == []


def examples(markdown: str, heading: str) -> list[str]:
    body = markdown.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)


def test_pages_show_what_lint_finds_and_the_right_versions_are_quiet() -> None:
    wrong = {}
    for entry in codes():
        markdown = page(entry.code, "en")
        failing = examples(markdown, "A small failing example")
        told = re.search(r"\$ gradsan lint( --maybe)? example.py\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
        shown = [] if told is None else re.findall(r"^example.py:(\d+):\d+: (GS\d+)", told[2], re.MULTILINE)
        read = possible if told is not None and told[1] else found
        came = [(str(line), code) for line, code in read(failing[0])]
        if (told is None and entry.code in {code for _, code in came}) or (told is not None and shown != came):
            wrong[entry.code] = (shown, came)
        loud = [one for source in examples(markdown, "The right version") for one in found(source)]
        if loud:
            wrong[entry.code, "right"] = loud
    assert wrong == {}


@each(
    "source",
    [
        # What a linter of names alone would take for faults.
        "import torch\nd = {}\nd['x'] = torch.sigmoid(torch.ones(3, requires_grad=True))\nd['x'] = 1\nsum(d.values())",
        "import numpy as np\nimport torch\nw = torch.ones(3, requires_grad=True)\na = np.exp(np.ones(3))\na += 1\n"
        "(w * 2).sum().backward()",
        "import torch\nfrom torch import nn\n\nclass M(nn.Module):\n    def forward(self, x):\n"
        "        y = torch.relu(x)\n        if not self.training:\n            y += 1\n        return y",
        "import torch\nw = torch.ones(3, requires_grad=True)\nwith torch.no_grad():\n    y = torch.exp(w)\n    y += 1\n"
        "(w * y).sum().backward()",
        "import torch\nfrom torch import nn\nnet = nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for x in torch.randn(4, 3, 2):\n    loss = net(x).mean()\n    opt.zero_grad()\n    loss.backward()\n"
        "    opt.step()",
        "import torch\nfrom accelerate import Accelerator\na = Accelerator()\n\ndef train(model, data, opt):\n"
        "    for x, y in data:\n        loss = model(x, labels=y).loss\n        a.backward(loss)\n        opt.step()",
        # A method of a module that is not its call, and a dict where a branch has a parameter.
        "import torch\nfrom lib import Net\nnet = Net()\n"
        "opt = torch.optim.Adam(net.parameters())\nx = net.features()\n\n\n"
        "def train():\n    loss = net(x).mean()\n    opt.zero_grad()\n    loss.backward()\n    opt.step()\n\n\n"
        "for epoch in range(9):\n    train()",
        "import torch\nfrom torch.nn import Parameter\n\n\nclass E:\n    def make(self, many):\n"
        "        self.mask = {k: Parameter(torch.ones(2)) for k in many} if many else Parameter(torch.ones(2))\n\n"
        "    def read(self):\n        return [m.grad for _, m in self.mask.items()]",
        # A sum that an inner loop begins anew.
        "import torch\nfrom torch import nn\nnet, measure = nn.Linear(2, 1), nn.MSELoss()\n"
        "loss = torch.zeros(1)\nfor x, y in torch.randn(4, 2, 3, 2):\n    for _ in range(3):\n"
        "        loss = measure(net(x), y)\n        net.zero_grad()\n        loss.backward()\n"
        "    loss += measure(net(y), x)",
        # Several values in the result of another file's class.
        "from collections import namedtuple\nimport torch\nfrom torch import nn\n"
        "Losses = namedtuple('Losses', 'policy critic')\nactor, critic = nn.Linear(2, 1), nn.Linear(2, 1)\n\n\n"
        "def losses(x):\n    return Losses(policy=actor(x).mean(), critic=critic(x).mean())\n\n\n"
        "both = losses(torch.ones(3, 2))\nboth.policy.backward()\nboth.critic.backward()",
        # Not a tensor's backward.
        "import torch\nfrom lib import Cam, Engine\ncam, engine = Cam(torch.nn.Linear(2, 1)), Engine()\n"
        "for x in range(3):\n    cam.forward(torch.ones(2))\n    cam.backward(index=x)\n"
        "    engine.backward(cam.loss(x))",
        # What a hook, or a class of another file, fills.
        "import torch\nfrom torch import nn\n\n\nclass Dream:\n    def __init__(self, net):\n"
        "        self.net, self.out = net, 0\n\n    def run(self, x):\n        def keep(module, args, out):\n"
        "            self.out = out\n        self.net.register_forward_hook(keep)\n        for _ in range(3):\n"
        "            self.net(x)\n            loss = -torch.mean(self.out)\n            loss.backward()\n\n\n"
        "Dream(nn.Linear(2, 2)).run(torch.ones(2))",
        "from torch import nn\n\n\nclass Agent:\n    def __init__(self):\n"
        "        self.measure = nn.CrossEntropyLoss()\n\n"
        "    def scores(self, batch):\n        raise NotImplementedError\n\n"
        "    def guess(self, batch):\n        pass\n\n"
        "    def train_step(self, batch):\n        loss = self.measure(self.guess(batch), batch.y)\n"
        "        loss.backward()",
        # A list that is emptied after each episode.
        "import torch\nfrom torch import nn\nnet = nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "saved = []\nfor episode in range(3):\n    for x in torch.ones(4, 2):\n        saved.append(net(x))\n"
        "    loss = torch.stack(saved).sum()\n    opt.zero_grad()\n    loss.backward()\n"
        "    opt.step()\n    del saved[:]",
        # Sampling goes through no backward.
        "import torch\nfrom torch import nn\n\n\nclass Flow(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.net = nn.Linear(3, 3)\n\n    def forward(self, x):\n"
        "        return self.net(x) * x\n\n    def inverse(self, u):\n        x = torch.zeros_like(u)\n"
        "        for i in range(3):\n            x[..., i] = u[..., i] * self.net(x)[..., i]\n        return x",
        # A list or a tensor.
        "import torch\n\n\ndef check(a):\n    if isinstance(a, list):\n        return [one.grad for one in a]\n"
        "    return a.grad\n\n\nw = torch.ones(3, requires_grad=True)\n(w * 2).sum().backward()\ncheck(w)\ncheck([w])",
        # Several outputs of one backward.
        "import torch\nfrom torch import nn\nnet = nn.Linear(2, 1)\nfor _ in range(3):\n"
        "    loss = net(torch.ones(3, 2)).pow(2).mean()\n"
        "    grads = torch.autograd.grad(loss, net.parameters(), create_graph=True)\n"
        "    torch.autograd.grad(grads, net.parameters(), [torch.randn_like(p) for p in net.parameters()])",
        # Of two towers, each has a graph of its own; a step leaves parameters alone that have no gradient.
        "import torch\nfrom lib import Twin\nnet = Twin()\nopt = torch.optim.Adam(net.parameters())\n"
        "for x in torch.ones(3, 2):\n    one, two = net(x)\n    first, second = one.mean(), two.mean()\n"
        "    opt.zero_grad()\n    first.backward()\n    opt.step()\n    second.backward()",
        "import torch\nfrom torch import nn\n\n\nclass Twin(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))\n"
        "        self.b = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))\n\n    def forward(self, x):\n"
        "        return self.a(x), self.b(x)\n\n\nnet = Twin()\nopt = torch.optim.Adam(net.parameters())\n"
        "for x in torch.ones(3, 2):\n    one, two = net(x)\n    first, second = one.mean(), two.mean()\n"
        "    opt.zero_grad()\n    first.backward()\n    opt.step()\n    opt.zero_grad()\n    second.backward()\n"
        "    opt.step()",
        # A gradient with respect to features runs what lies behind them only.
        "import torch\nfrom torch import nn\nbody, head = nn.Linear(2, 3), nn.Linear(3, 1)\n"
        "features = torch.tanh(body(torch.ones(4, 2)))\n"
        "slope = torch.autograd.grad(head(features).sum(), features)[0]\n"
        "head(features * (slope > 0)).mean().backward()",
        # A graph that another method, or another file, goes through again.
        "import torch\nfrom torch import nn\n\n\nclass Gan:\n    def __init__(self):\n"
        "        self.g, self.d = nn.Linear(2, 2), nn.Linear(2, 1)\n\n    def one(self, x):\n"
        "        self.fake = self.g(x)\n        loss = self.d(self.fake).mean()\n"
        "        loss.backward(retain_graph=True)\n\n    def two(self):\n        self.fake.sum().backward()",
        "import torch\nfrom torch import nn\nfrom lib import second\nnet = nn.Linear(2, 2)\n"
        "out = net(torch.ones(3, 2))\n"
        "loss = out.mean()\nloss.backward(retain_graph=True)\nsecond(out)",
        "import torch\n\n\ndef diversity(real, fake):\n    loss = torch.nn.functional.mse_loss(fake, real)\n"
        "    loss.backward(retain_graph=True)\n    return loss.item()",
        # A number of another file's.
        "import torch\nfrom torch import nn\nfrom utils import to_scalar\nnet, total = nn.Linear(2, 1), 0\n"
        "for x in torch.ones(4, 3, 2):\n    loss = net(x).mean()\n    loss.backward()\n    total += to_scalar(loss)",
        # Results of an operation that is not known: here they are no views of one tensor.
        "import torch\nfrom torch import nn\nnet = nn.Linear(4, 3)\na = net(torch.ones(2, 4))\n"
        "m = a.sum(1, keepdim=True)\na, m = torch.broadcast_tensors(a, m)\na -= m\na.sum().backward()",
        # A module's own flag.
        "from torch import nn\n\n\nclass C(nn.Module):\n    def __init__(self, requires_grad=True):\n"
        "        super().__init__()\n        self.requires_grad = requires_grad",
        "import pytest\nimport torch\n\ndef test_it():\n    w = torch.ones(3, requires_grad=True)\n"
        "    with pytest.raises(RuntimeError):\n        w += 1",
        # To name an attribute asks whether it is there, or runs a property.
        "import torch\nimport pytest\n\ndef test_it(opt):\n    opt.zero_grad()\n"
        "    with pytest.raises(AttributeError):\n        opt.step",
        "import torch\n\ndef steps(opt):\n    opt.zero_grad()\n    try:\n        opt.step\n"
        "    except AttributeError:\n        return False\n    return True",
        "import torch\n\n\nclass Clock:\n    @property\n    def step(self):\n        self.now += 1\n\n"
        "    def zero_grad(self):\n        self.now = 0\n\n    def run(self):\n        self.zero_grad()\n"
        "        self.step",
        "import torch\n\n\ndef go(robot, path):\n    robot.step\n    for part in path:\n        part.backward",
    ],
)
def test_right_programs_are_quiet(source: str) -> None:
    assert found(source) == []


def test_a_batch_that_another_file_returns_has_no_graph_even_maybe() -> None:
    source = """
import torch


class Soft:
    def __init__(self, policy, value, replay):
        self.policy, self.value, self.replay = policy, value, replay
        self.opts = [torch.optim.Adam(net.parameters()) for net in (policy, value)]

    def learn(self):
        seen, reward = (one.float() for one in self.replay.draw())
        fit = (self.value(seen) - reward).pow(2).mean()
        fit.backward()
        self.opts[1].step()
        gain = self.value(torch.cat([seen, self.policy(seen)], 1)).mean()
        (-gain).backward()
        self.opts[0].step()
"""
    assert possible(source) == []
    # A forward pass of known parameters is a graph.
    assert possible(source.replace("seen, reward = (", "seen, reward = (self.value(one) * ")) != []


def test_rounds_that_another_file_makes_share_no_graph_even_maybe() -> None:
    source = """
import torch
from tracking import Settings, monitor


class Fitting(Settings):
    def prepare(self):
        self.network = torch.nn.Linear(2, 2)
        self.opt = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def fit(self):
        for _ in range(3):
            for x, y in monitor.iterate("fitting", self.pairs):
                self.opt.zero_grad()
                (self.network(x) - y).square().mean().backward()
                self.opt.step()
"""
    assert possible(source) == []
    # Given a value with a graph, that graph may be shared by all.
    assert possible(source.replace("self.pairs)", "torch.nn.Linear(2, 2)(self.pairs))")) != []


def test_data_that_a_library_prepares_once_has_no_graph_even_maybe() -> None:
    source = """
import torch
from graphs import Planets, Convolution, Compose

prepare = Compose([])
data = prepare(Planets("here")[0]).to("cpu")
net = Convolution(3, 4)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    loss = (net(data.x, data.edges) - data.y).square().mean()
    loss.backward()
    opt.step()
"""
    assert possible(source) == []
    # A network that an optimizer trains is a graph.
    assert possible(source.replace("prepare(", "net(").replace("net = C", "net = prepare = C")) != []


def test_a_state_that_comes_with_the_loss_has_a_graph() -> None:
    source = """
def fit(task, batches, opt):
    state = None
    for batch in batches:
        out = task.step(batch, state)
        state = out["state"]
        opt.zero_grad()
        out["loss"].backward()
        opt.step()
"""
    assert [code for _, code in possible("import torch\n" + source)] == ["GS401"]
