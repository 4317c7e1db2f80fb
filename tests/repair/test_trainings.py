"""The verdicts *same training* and *rejected*: each pair's right and harmful patch, run and compared."""

from __future__ import annotations

import pytest
import torch
from training_pairs import PAIRS

from gradsan.launch.program import Target
from gradsan.model import Fix, Message
from gradsan.repair.judging import Judge, faults_of
from gradsan.repair.patch import Patch
from gradsan.repair.reference import reference_for
from gradsan.repair.trials.runner import Runner
from gradsan.repair.trials.state import LeftOver
from gradsan.repair.trials.trial import Request
from gradsan.text import say

FIX = Fix("any", "changed", Message("fix.reorder_step"), how_changed=Message("fix.reorder_step_how"))

LONG = {
    "best_weights_before_the_step",
    "compiled",
    "flat_buffer",
    "in_place_layer",
    "parameter_replaced",
    "replay_of_numpy_not_filled",
    "schedule_of_another_step",
    "state_of_a_recurrence_forgotten",
    "statistics_of_a_holder",
    "target_network_before_the_step",
}
"""Other programs of what one of the rest loses."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def runner(folder):
    (folder / "main.py").write_text("import torch.optim\n")
    with pytest.MonkeyPatch.context() as patch, Runner(Target("script", str(folder / "main.py"))) as made:
        patch.chdir(folder)
        yield made


@pytest.fixture
def judged(folder, runner):
    """The verdicts on the patches of a pair: (training, differs_in, detail) of the right one and of the harmful one."""

    def judge(pair):
        file = folder / "main.py"
        file.write_text(pair.broken)
        request = Request(("script", str(file), ()), "watch", {}, 20, 60.0)
        first = runner.run(request)
        patches = [Patch({str(file): text.encode()}) for text in (pair.right, pair.harmful)]
        requests = [reference_for(request, faults_of(first))]
        requests += [Request(request.target, "watch", one.files, 20, 60.0) for one in patches]
        reference, *trials = runner.run_all(requests, side_by_side=2)
        assert reference.recording.finished, reference.output
        held = Judge(reference, True, lambda message: say(message, "en"), folder)
        return [
            held.tried(FIX, patch, trial, first).fix.verification for patch, trial in zip(patches, trials, strict=True)
        ]

    return judge


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.long if one in LONG else ()) for one in PAIRS])
def test_the_right_patch_keeps_the_training_and_the_harmful_one_does_not(judged, name):
    pair = PAIRS[name]
    right, harmful = judged(pair)
    assert (right.training, right.differs_in) == ("same", ()), right.detail
    assert harmful.training == pair.verdict, harmful
    assert pair.lost in (harmful.detail if pair.verdict == "rejected" else harmful.differs_in), harmful


def test_the_long_ones_exist():
    assert set(PAIRS) > LONG


ROUNDS = """
import torch
from gradsan.repair.trials import recording

{limit}
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def train():
    batch = torch.randn(4, 3)
    optimizer.zero_grad()
    net(batch).sum().backward()
    optimizer.step()

for _ in range(6):
    train()
"""


def test_the_variables_of_the_end_are_those_of_the_last_round_without_time_to_look_before(folder, runner):
    ends = []
    for limit in ("", "recording._FREE_SECONDS = -1e9"):
        file = folder / "main.py"
        file.write_text(ROUNDS.format(limit=limit))
        recorded = runner.run(Request(("script", str(file), ()), "watch", {}, 0, 60.0)).recording
        ends.append((len(recorded.moments), recorded.moments[-1].values["train: batch"].checksum))
    assert ends[0][0] > ends[1][0]
    assert ends[0][1] == ends[1][1]


def test_an_update_by_hand_uses_what_is_cleared_after_it():
    left, leaf = LeftOver(), torch.zeros(2, requires_grad=True)
    (leaf * 2).sum().backward()
    left.backward([leaf])
    # The model of a file takes its place: what was added to its gradients is known no more.
    del leaf
    assert left.unused() == 0
    leaf = torch.zeros(2, requires_grad=True)
    left.step(torch.optim.SGD([leaf], lr=0.1), "main.py:1")
    assert left.unused() == 1
