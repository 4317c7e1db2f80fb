"""States added to a list that outlives the rounds: where the source decides that they may be detached."""

from __future__ import annotations

from cases import each
from gradsan import source

REPLAY = """
from collections import deque
class Replay:
    def __init__(self):
        self.memory = deque({bound})
    def push(self, {parameters}):
        {unpacked}
        self.memory.append({added})
replay = Replay()
q, new = net(obs, h)
replay.push({given})
"""


@each(
    ("bound", "parameters", "unpacked", "added", "given", "part", "changed"),
    [
        ("maxlen=9", "*one", "pass", "one", "obs, h", "[1]", "replay.push(obs, h.detach())"),
        ("maxlen=9", "a, b", "pass", "(a, b)", "obs, h", "[1]", "        self.memory.append((a, b.detach()))"),
        ("[], 9", "a, s", "x, y = s", '{"y": y}', "obs, h", '["y"]', '        self.memory.append({"y": y.detach()})'),
        ("maxlen=9", "**row", "pass", "row", "act=q, hid=h", '["hid"]', "replay.push(act=q, hid=h.detach())"),
        ("maxlen=9", "*, s", "pass", '{"hid": s}', "s=h", '["hid"]', '        self.memory.append({"hid": s.detach()})'),
        # A list of any length may be one that is to be emptied.
        ("", "*one", "pass", "one", "obs, h", "[1]", None),
        # What the round computes is kept to be trained.
        ("maxlen=9", "*one", "pass", "one", "obs, q", "[1]", None),
        ("maxlen=9", "a, b", "pass", "(a, b)", "obs, q", "[1]", None),
    ],
)
def test_states_given_to_a_round_are_added_without_graph(
    bound, parameters, unpacked, added, given, part, changed, tmp_path
):
    file = tmp_path / "train.py"
    fields = {"bound": bound, "parameters": parameters, "unpacked": unpacked, "added": added, "given": given}
    text = REPLAY
    for name, value in fields.items():
        text = text.replace(f"{{{name}}}", value)
    file.write_text(text)
    found = source.detach_collected(str(file), [f"replay.memory[3]{part}"])
    lines = () if found is None else source.changed_lines(str(file), found[0])
    assert [line for _, _, line in lines] == ([] if changed is None else [changed])


def test_a_list_of_any_length_that_every_round_reads_again(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("rows = []\nq, new = net(obs, h)\nrows.append((obs, h))\n")
    assert source.detach_collected(str(file), ["rows[3][1]"]) is None
    found = source.detach_collected(str(file), ["rows[3][1]"], of_any_length=True)
    assert found is not None
    assert found[0].new == "rows.append((obs, h.detach()))"
