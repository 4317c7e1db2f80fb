"""Timeline and graph of a report: from evidence written by hand, then from a real run."""

import dataclasses
import json

from forked import run_forked
from gradsan.diagnose.build import EVENTS_KEPT, events_of, folded, joined, path_of
from gradsan.diagnose.facts import examine
from gradsan.model import (
    Bridge,
    Conflict,
    Diagnosis,
    Event,
    Frame,
    Message,
    Moment,
    Passed,
    Program,
    Region,
    Report,
    Save,
    Seen,
    Site,
    TensorInfo,
    Use,
    Write,
)
from gradsan.present import render_html, render_json
from gradsan.present.json import from_dict

BOX = Region(0, (4,), (1,), 4)


def write(clock, kind="inplace", op="add_", region=BOX, **more):
    return Write(clock, Site(), op, kind, clock, region, **more)


def conflict(*writes, **more):
    save = Save(10, Site(), TensorInfo((4,), "float32", "cpu", 1, BOX), 3, "MulBackward0", "self", step=1)
    return Conflict(save, writes, Use(90, Site(), 5, step=2), **more)


def told(*writes, moments=(), **more):
    return [(one.kind, one.clock, one.touches) for one in events_of(examine(conflict(*writes, **more)), moments)[0]]


def moment(kind, clock):
    return Moment(kind, clock, 0, "x", Site())


def test_events_come_by_the_clock_and_say_what_touches_the_saved_part():
    beside = write(30, region=Region(8, (2,), (1,), 4))
    assert told(write(50), beside, write(40, kind="step", op="SGD.step")) == [
        ("saved", 10, True),
        ("written", 30, False),
        ("step", 40, True),
        ("written", 50, True),
        ("backward", 90, True),
        ("used", 90, True),
    ]


def test_versions_and_steps_are_those_of_the_evidence():
    events, _ = events_of(examine(conflict(write(50))))
    assert [(one.version, one.step) for one in events] == [(3, 1), (50, 0), (None, 2), (5, 2)]


def test_the_runs_own_steps_and_backwards_stand_between_save_and_use_only():
    moments = [moment(kind, clock) for clock in (5, 20, 40, 80, 95) for kind in ("step", "backward")]
    assert told(write(40, kind="step", op="SGD.step"), moments=moments) == [
        ("saved", 10, True),
        ("step", 20, False),
        ("backward", 20, True),
        ("step", 40, True),
        ("backward", 40, True),
        ("step", 80, False),
        ("backward", 80, True),
        ("used", 90, True),
    ]


def test_of_too_many_both_ends_are_kept_and_the_others_counted():
    """10,000 writes: the save, the first, the last, and the use are there, and so they are on paper."""
    save = Save(10, Site(), TensorInfo((4,), "float32", "cpu", 1, BOX), 3, "MulBackward0", "self")
    many = Conflict(save, tuple(write(11 + number) for number in range(10_000)), Use(20_000, Site(), 10_003))
    events, left_out = events_of(examine(many))
    kinds = [one.kind for one in events]
    assert (kinds[0], kinds[-2:], len(events), left_out) == ("saved", ["backward", "used"], EVENTS_KEPT, 10_003 - 2_000)
    assert (events[1].clock, events[-3].clock) == (11, 11 + 9_999)
    found = finding(events, left_out)
    report = Report(program=Program(), seen=Seen(), diagnoses=(found,), gradsan="0", torch="0", python="3")
    written = json.loads(render_json(report, language="en"))
    assert from_dict(written).report.diagnoses[0].events_left_out == written["diagnoses"][0]["events_left_out"] == 8_003
    assert "8,003 events in the middle are left out" in render_html(report, language="en")


def finding(events, left_out=0):
    message = Message("report.plain", {"text": "x"})
    more = {"events": events, "events_left_out": left_out}
    return Diagnosis("GS101", "x", "error", False, message, message, (), **more)


def test_one_finding_met_twice_has_each_event_once():
    known = finding(events_of(examine(conflict(write(50))))[0])
    again = finding(events_of(examine(conflict(write(60))))[0])
    assert joined(known, known) == (known.events, 0)
    assert [one.clock for one in joined(known, again)[0]] == [10, 50, 60, 90, 90]
    full = finding(tuple(Event("written", clock) for clock in range(EVENTS_KEPT)), 7)
    kept, left_out = joined(full, finding((Event("used", 5_000),), 2))
    assert (len(kept), kept[0].clock, kept[-1].kind, left_out) == (EVENTS_KEPT, 0, "used", 7 + 2 + 1)


def way(**more):
    return [(path_node.kind, path_node.name) for path_node in path_of(examine(conflict(**more)))]


def test_the_way_without_a_crossing_has_a_gap():
    assert way() == [("loss", None), ("gap", None), ("saved", "MulBackward0")]


def passed(*names, younger=0):
    frames = {name: Frame("/a.py", 1 + index, "f") for index, name in enumerate(sorted(set(names)))}
    return tuple(Passed(name, frames[name], index < younger) for index, name in enumerate(names))


def shown(nodes):
    return [(one.kind, one.name, one.count, one.nodes) for one in nodes]


def test_rounds_of_a_loop_are_one_entry_and_a_long_way_keeps_both_ends():
    loop = passed("Mean", *("Mul", "Tanh", "Addmm") * 700, "Exp")
    assert shown(folded(loop)) == [
        ("node", "Mean", 1, 1),
        ("repeat", "Mul → Tanh → Addmm", 700, 2100),
        ("node", "Exp", 1, 1),
    ]
    assert shown(folded(passed(*"AABBB"))) == [
        ("node", "A", 1, 1),
        ("node", "A", 1, 1),
        ("repeat", "B", 3, 3),
    ]
    assert [one.frame is None for one in folded(passed(*"ABABAB", *"CCC"))] == [True, False]
    different = [str(number) for number in range(2000)]
    kept = shown(folded(passed(*different)))
    assert len(kept) == 12
    assert kept[6] == ("gap", None, 1, 1989)
    assert (kept[0][1], kept[-1][1]) == ("0", "1999")
    assert sum(one[3] for one in kept) == 2000
    assert folded(()) == ()


def test_the_way_has_its_nodes_and_the_bridge_where_they_cross():
    bridge = Bridge("AddBackward0", "CatBackward0", "h")
    nodes = passed("MeanBackward0", "CatBackward0", "AddBackward0", "MulBackward0", younger=2)
    step = write(40, kind="step", op="SGD.step")
    made = path_of(examine(conflict(step, bridge=bridge, passed=nodes)))
    assert [(one.kind, one.name) for one in made] == [
        ("loss", None),
        ("node", "MeanBackward0"),
        ("node", "CatBackward0"),
        ("bridge", "h"),
        ("node", "AddBackward0"),
        ("saved", "MulBackward0"),
    ]
    assert [one.kind for one in path_of(examine(conflict(passed=nodes)))] == ["loss", *["node"] * 3, "saved"]


def test_the_way_over_an_update_has_a_bridge_and_another_has_none():
    bridge = Bridge("AddBackward0", "CatBackward0", "h")
    step = write(40, kind="step", op="SGD.step")
    made = [(path_node.kind, path_node.name) for path_node in path_of(examine(conflict(step, bridge=bridge)))]
    assert made == [
        ("loss", None),
        ("gap", None),
        ("node", "CatBackward0"),
        ("bridge", "h"),
        ("node", "AddBackward0"),
        ("gap", None),
        ("saved", "MulBackward0"),
    ]
    made = [path_node.kind for path_node in path_of(examine(conflict(write(40), bridge=bridge)))]
    assert "bridge" not in made
    near = Bridge("MulBackward0", "CatBackward0", "h")
    assert [path_node.kind for path_node in path_of(examine(conflict(step, bridge=near)))] == [
        "loss",
        "gap",
        "node",
        "bridge",
        "saved",
    ]


def test_without_a_node_there_is_no_way():
    nameless = conflict()
    nameless = dataclasses.replace(nameless, save=dataclasses.replace(nameless.save, node=None))
    assert path_of(examine(nameless)) == ()


PROGRAM = """
import torch
net = torch.nn.Linear(2, 2)
other = torch.nn.Linear(2, 2)
first, second = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
x = torch.ones(1, 2, requires_grad=True)
loss = net(x).sum()
other(torch.ones(1, 2)).sum().backward()
second.step()
loss.backward(retain_graph=True)
first.step()
loss.backward()
"""


def test_a_real_run_gives_the_steps_and_backwards_between(tmp_path):
    (tmp_path / "main.py").write_text(PROGRAM)
    run_forked(["-m", "gradsan", "run", "--quiet", "--json", "r.json", "main.py"], tmp_path)
    [found] = json.loads((tmp_path / "r.json").read_text())["diagnoses"]
    assert [(one["kind"], one["line"], one["touches"]) for one in found["events"]] == [
        ("saved", 7, True),
        ("backward", 8, True),
        ("step", 9, False),
        ("backward", 10, True),
        ("step", 11, True),
        ("backward", 12, True),
        ("used", 12, True),
    ]


CARRIED = """
import torch
cell = torch.nn.Linear(2, 2)
h = torch.zeros(1, 2)
for batch in range(2):
    for t in range(50):
        h = torch.tanh(cell(h))
    loss = h.square().sum()
    loss.backward(retain_graph=RETAIN)
    torch.optim.SGD(cell.parameters(), 0.1).step()
"""


def test_a_real_way_leads_from_line_to_line_and_over_the_bridge(tmp_path):
    for retain, code in ((True, "GS111"), (False, "GS401")):
        (tmp_path / "main.py").write_text(CARRIED.replace("RETAIN", str(retain)))
        run_forked(["-m", "gradsan", "run", "--quiet", "--json", "r.json", "main.py"], tmp_path)
        [found] = json.loads((tmp_path / "r.json").read_text())["diagnoses"]
        assert found["code"] == code
        shown = [(one["kind"], one["name"], one["count"], one["line"]) for one in found["way"]]
        assert shown[:4] == [
            ("loss", None, 1, None),
            ("node", "SumBackward0", 1, 8),
            ("node", "PowBackward0", 1, 8),
            ("repeat", "TanhBackward0 → AddmmBackward0", 50, 7),
        ]
        assert ("bridge", "h", 1, None) in shown
        assert shown[-1][0] == "saved"
        assert shown[-1][3] == 7
