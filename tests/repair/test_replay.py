"""Programs that draw random numbers, load data with workers, or never compute the same twice."""

import textwrap
from dataclasses import replace

import pytest

from cases import each
from gradsan.launch.program import Target
from gradsan.model import Diagnosis, Fix, Frame, Label, Message
from gradsan.repair import Limits, find_fixes, runs_well, why_untried
from gradsan.repair.reference import is_replayable, reference_for, was_refused
from gradsan.repair.trials.runner import Runner
from gradsan.repair.trials.trial import Recording, Request, Trial
from gradsan.text import say

WORKERS = """
    import random
    import os, time
    import numpy
    import torch
    from torch.utils.data import DataLoader, Dataset


    class Numbers(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, position):
            return torch.full((3,), float(position)) / 10 + random.random() + numpy.random.rand()


    if __name__ == "__main__":
        # Nothing is seeded, but by the time.
        torch.manual_seed(time.time_ns())
        numpy.random.seed(int(time.time()))
        own, state, drawn = random.Random(), numpy.random.RandomState(), numpy.random.default_rng()
        random.seed(os.getpid())
        scale = random.SystemRandom().choice([0.5, 0.75, 1.0, 1.25])
        scale += own.random() + state.rand() + drawn.random() + random.random() + torch.rand(()).item()
        random.seed()
        torch.seed()
        net = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=random.random())
        for batch in DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2):
            out = net(scale * batch * float(numpy.random.rand())).sigmoid()
            out *= 2
            optimizer.zero_grad()
            out.sum().backward()
            optimizer.step()
"""
ENTROPY = """
    import os
    import torch
    w = torch.full((3,), float(os.urandom(1)[0]) + os.urandom(1)[0] / 256, requires_grad=True)
    a = (w * 0.001).exp()
    a += 1
    a.sum().backward()
"""


SHARED_AVERAGE = """
import torch
torch.manual_seed(2)
net, other = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
first, second = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(net.parameters(), lr=0.1)
average = [p.data.clone() for p in net.parameters()]
for _ in range(6):
    hidden = net(torch.randn(5, 3))
    one, two = other(hidden.detach()).mean() ** 2, other(hidden).exp().mean()
    first.zero_grad()
    one.backward()
    first.step()
    second.zero_grad()
    two.backward()
    second.step()
    for number, p in enumerate(net.parameters()):
        average[number] -= 0.1 * (average[number] - p.data)
        p.data = average[number]
"""
ANOTHER_ERROR = """
    import sys, torch
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        for number in range(30):
            optimizer.zero_grad()
            hidden = net[0](torch.randn(5, 3)).exp()
            hidden += 1
            net[1](hidden).pow(2).mean().backward()
            optimizer.step()
            if number == 2:
                {}["metrics"]
    except (RuntimeError, KeyError) as failure:
        sys.exit(3)
"""


SET_OF_TENSORS = """
    import torch
    ends = [torch.full((), float(number)) for number in range(200)]
    print([int(one) for one in {*ends}])
"""


def search(tmp_path, monkeypatch, text, **limits):
    (tmp_path / "main.py").write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    return find_fixes(
        ("script", "main.py", ()), Limits(**limits), lambda message: None, lambda one: say(one, "en"), tmp_path
    )


def best(found):
    return found.diagnoses[-1].fixes[0]


def test_random_numbers_and_workers_are_the_same_in_every_trial(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, WORKERS)
    assert found.problems == ()
    assert (best(found).kind, best(found).meaning) == ("out_of_place", "preserved")
    assert best(found).verification.gradient_difference == 0


def test_unrepeatable_programs_are_named_so(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, ENTROPY)
    assert [one.key for one in found.problems] == ["fix.not_replayable"]
    fix = best(found)
    assert (fix.verification.status, fix.meaning, fix.applicability) == ("passed", "changed", "review")
    assert fix.verification.gradient_difference is None
    assert "two runs" in say(fix.how_changed, "en")


def test_objects_lie_elsewhere_where_two_runs_are_to_tell_chance(tmp_path):
    path = tmp_path / "main.py"
    path.write_text(textwrap.dedent(SET_OF_TENSORS))
    request = Request(("script", str(path), ()), "watch", {}, 0, 60.0)
    with Runner(Target("script", str(path), ())) as runner:
        printed = [runner.run(replace(request, shifted=shifted)).all_texts for shifted in (False, False, True)]
    # Two forks of one process mostly have equal addresses, which no test can count on.
    assert printed[2] not in printed[:2]


def test_a_program_that_has_another_error_too_is_mended_up_to_there(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, ANOTHER_ERROR)
    fix = best(found)
    assert (fix.kind, fix.verification.status, fix.verification.training) == ("out_of_place", "passed", None)
    assert (fix.meaning, found.left) == ("changed", ("SystemExit", "3"))
    assert "KeyError: 'metrics' at main.py:14" in fix.verification.detail
    assert "what would follow is not known" in say(fix.how_changed, "en")
    assert len(found.patches) == 2
    target = ("script", "main.py", ())
    assert not runs_well(target, Limits(), ends_by=found.left)
    (tmp_path / "main.py").write_bytes(next(iter(found.patches[0].files.values())))
    assert (runs_well(target, Limits()), runs_well(target, Limits(), ends_by=found.left)) == (False, True)


def test_a_silent_fault_of_the_healed_program_is_another_one(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, SHARED_AVERAGE)
    assert [one.code for one in found.diagnoses] == ["GS110", "GS216"]
    fix = found.diagnoses[0].fixes[0]
    assert (fix.kind, fix.verification.status, fix.verification.training) == ("reorder_step", "passed", "same")
    assert (len(found.chosen), found.remaining) == (1, ("GS216",))
    assert {one.verification.training for one in found.diagnoses[0].fixes} >= {"same", "changed"}
    target = ("script", "main.py", ())
    (tmp_path / "main.py").write_bytes(next(iter(found.patches[0].files.values())))
    assert (runs_well(target, Limits()), runs_well(target, Limits(), remaining=found.remaining)) == (False, True)


CARRIED_AND_SHARED = """
import torch
torch.manual_seed(3)
words, back = torch.nn.Embedding(9, 6), torch.nn.Linear(9, 6, bias=False)
back.weight = torch.nn.Parameter(words.weight.t().data)
cell = torch.nn.GRUCell(6, 6)
optimizer = torch.optim.Adam([*words.parameters(), *back.parameters(), *cell.parameters()], lr=0.01)
said = None
for step in range(5):
    state, loss = torch.zeros(4, 6), 0
    for _ in range(3):
        word = torch.ones(4, 9) if said is None else said
        state = cell(back(word), state)
        said = torch.softmax(state @ words.weight.t(), 1)
        loss = loss - said[:, step].log().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_so_it_is_where_the_fix_changes_the_training(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, CARRIED_AND_SHARED)
    assert [one.code for one in found.diagnoses] == ["GS401", "GS216"]
    fix = found.diagnoses[0].fixes[0]
    assert (fix.kind, fix.verification.training) == ("detach_carried_state", "changed")
    assert found.remaining == ("GS216",)


@pytest.mark.parametrize(
    ("file", "kinds", "reason"),
    [
        ("here", ("out_of_place",), "fix.none_tried"),
        ("<string>", ("out_of_place",), "fix.none_tried_no_source"),
        ("here", ("out_of_place", "change_library"), "fix.none_tried_library"),
    ],
)
def test_why_nothing_was_tried(file, kinds, reason):
    frame = Frame(__file__ if file == "here" else file, 1, "<module>", is_user=True)
    label = Label("written", frame, Message("label.any"))
    assert why_untried([fault("any", *kinds), replace(fault("any", *kinds), labels=(label,))]).key == reason


def fault(cause, *kinds, silent=False):
    said = Message("title.any")
    fixes = tuple(Fix(kind, "preserved", said) for kind in kinds)
    return Diagnosis("GS000", cause, "error", silent, said, said, (), fixes=fixes)


@each(
    ("first", "again", "silent", "same"),
    [
        ((1.0, 2.0), (1.0, 2.0, 3.0), False, True),
        ((1.0, 2.0), (1.0, 2.1), False, False),
        # What a healed gradient has moved is no sign of chance.
        ((1.0, 2.0), (1.0, 2.1), True, True),
        ((1.0,), (1.1,), True, False),
        ((float("nan"),), (float("nan"),), False, True),
        ((), (1.0,), False, True),
        # Something that the first run left behind stops the second.
        ((1.0,), (), False, False),
    ],
)
def test_losses_decide_whether_two_runs_are_the_same(first, again, silent, same):
    trial = Trial(1, Recording(begun=first), (fault("any", silent=silent),))
    assert is_replayable(trial, Trial(1, Recording(begun=again))) is same


def test_a_run_that_was_stopped_is_no_sign_of_chance():
    assert is_replayable(Trial(1, Recording(begun=(1.0,))), Trial(None))


def test_the_reference_carries_out_what_pytorch_refuses():
    request = Request(("script", "main.py", ()), "watch", {}, 3, 9.0)
    healed = reference_for(request, [fault("result_overwritten")])
    assert (healed.mode, healed.allowances, healed.steps) == ("heal", frozenset(), 3)
    assert reference_for(request, [fault("same_loss_twice")]).allowances == {"keep_graphs"}
    update, computation = fault("leaf_written", "no_grad"), fault("leaf_written", "out_of_place", "no_grad")
    assert reference_for(request, [update]).allowances == {"write_leaves"}
    assert reference_for(request, [computation]).allowances == {"renew_leaves"}
    assert was_refused(update)
    assert not was_refused(fault("result_overwritten"))


def test_places_of_a_patched_program_are_those_of_the_files_on_disk(tmp_path):
    from gradsan.model import Frame, Site
    from gradsan.repair.patch import Patch, on_disk

    file = tmp_path / "main.py"
    file.write_text("a = 1\nb = 2\nc = 3\n")
    patch = Patch().with_lines(((str(file), 1, "z = 0\na = 1"), (str(file), 2, "b = 9")))

    def label(line):
        frame = Frame(str(file), line, "<module>", 1, line, 6, is_user=True)
        return Label("written", frame, Message("label.any"), site=Site((frame,)))

    wrong = Diagnosis("GS000", "any", "error", False, Message("t"), Message("e"), (label(2), label(3), label(4)))
    moved = on_disk(wrong, patch).labels
    assert [one.frame.line for one in moved] == [1, 2, 3]
    # Columns of a line that reads otherwise would point at something else.
    assert [one.frame.column for one in moved] == [1, None, 1]
    assert moved[2].site.frames == (moved[2].frame,)
