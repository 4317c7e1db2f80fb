"""Carried states, as their live values show them, and the lines that cut them off after the round."""

from __future__ import annotations

from dataclasses import replace

from cases import each
from gradsan import source
from gradsan.diagnose import carriers
from gradsan.model import Fix, Frame, Held, Layer, Site

TEXT = """\
class Trainer:
    def __init__(self):
        self.states = {made}

    def train_on(self, stream, x):
        y, {name} = self.model(x, self.states.get(stream))
        loss = y.mean()
        loss.backward()
        return loss.item()
"""


@each(
    "made, name, inner, line",
    [
        (
            "{}",
            "self.states",
            "tuple",
            "self.states = {name: tuple(s.detach() for s in part) for name, part in self.states.items()}",
        ),
        ("{}", "self.states", None, "self.states = {key: s.detach() for key, s in self.states.items()}"),
        (
            "Table()",
            "self.states[stream]",
            "tuple",
            "self.states[stream] = tuple(s.detach() for s in self.states[stream])",
        ),
        ("Table()", "self.states[stream]", None, "self.states[stream] = self.states[stream].detach()"),
    ],
)
def test_the_live_value_shows_the_members_of_a_container(made, name, inner, line, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(TEXT.replace("{made}", made).replace("{name}", name))
    around = [Layer("self", "object"), Layer("self.states", "dict", (inner or "tensor",))]
    path = 'self.states["a"]'
    if inner is not None:
        around.append(Layer(path, inner, ("tensor",)))
        path += "[0]"
    held = Held(path, str(file), "Trainer.train_on", around[-1].path, around[-1].kind, True, False, tuple(around))
    bound, used = (Frame(str(file), at, "Trainer.train_on", is_user=True) for at in (6, 8))
    carried = source.Carried(name, 6, bound)
    carrier = carriers.Carrier(name, bound, (), ((name, carried),), 0, True, (held,))
    found = carriers.cut(Site((used,)), None, carrier)
    assert found is not None
    assert found[0].new.split("\n")[0].strip() == line


@each("path, is_cut", [("net.mean", True), ("net[1].mean", False)])
def test_an_attribute_of_another_module_is_not_cut(path, is_cut, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "for x in data:\n    y = net(x)\n    y.backward()\n\n\ndef forward(self, x):\n    self.mean = f(self.mean)\n"
    )
    at, used, bound = (
        Frame(str(file), *place, is_user=True) for place in ((2, "<module>"), (3, "<module>"), (7, "forward"))
    )
    held = Held(path, str(file), "<module>", path.rpartition(".")[0], "object", True)
    carried = source.Carried("self.mean", 7, bound)
    carrier = carriers.Carrier("self.mean", bound, (at,), (("net.mean", carried),), 0, False, (held,))
    assert (carriers.cut(Site((used,)), None, carrier) is not None) == is_cut


@each(
    "lines, kinds",
    [((), ["recompute_forward", "detach_carried_state"]), (("line",), ["detach_carried_state"])],
)
def test_a_cut_of_all_that_a_loss_would_train_is_not_called_usual(lines, kinds, tmp_path):
    file = tmp_path / "bandit.py"
    file.write_text(
        "def play(policy, opt, contexts, waiting):\n    for context in contexts:\n"
        "        arm, chance = policy.choose(context)\n        waiting.append((context, arm, chance))\n"
        "        context, arm, chance = waiting.popleft()\n        opt.zero_grad()\n"
        "        (-gain(context, arm) * chance).backward()\n        opt.step()\n"
    )
    bound, updated = (Frame(str(file), at, "play", is_user=True) for at in (5, 8))
    carrier = carriers.Carrier("chance", bound, (), (("chance", source.Carried("chance", 5, bound)),), 0, False, ())
    detach = Fix.worded("fix.detach_carried_state", {"bridge": "chance"}, lines)
    found = carriers.cut_term((detach,), Site((updated,)), carrier, ())
    assert [one.kind for one in found] == kinds
    assert found[-1].how_changed.key == "help.cut_term_how"


def test_a_cut_of_an_average_is_usual_though_its_first_value_was_taken_over(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "def level(state, loss):\n    state.mean = loss if state.mean is None else state.mean\n"
        "    state.mean = 0.9 * state.mean + 0.1 * loss\n    return loss - state.mean\n"
    )
    bound = Frame(str(file), 3, "level", is_user=True)
    carrier = carriers.Carrier("state.mean", bound, (), (), 0, False, ())
    detach = Fix.worded("help.detach_carried_state", {"bridge": "state.mean"})
    made = Site((replace(bound, line=2),))
    assert carriers.cut_term((detach,), None, carrier, (made,)) == (detach,)
