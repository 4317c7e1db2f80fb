"""Parts of one call that a loop writes: computed anew and joined, where the source shows that nothing is lost."""

from cases import each
from gradsan.model import Frame
from gradsan.source import named_parts_joined, parts_collected

_PROGRAM = """import torch
def changed(x, means):
    for {target} in {walked}:
        {write}
    return x
"""


@each(
    "target, walked, write, made",
    [
        ("part", "x", "part += 1", ("part = part + 1", "torch.stack(parts)", "preserved")),
        ("part", "x.chunk(2, -1)", "part.mul_(2)", ("part = part.mul(2)", "torch.cat(parts, dim=-1)", "preserved")),
        ("i, part", "enumerate(x.split(3))", "part -= i", ("part = part - i", "torch.cat(parts)", "preserved")),
        (
            "part, m",
            "zip(x.unbind(1), means)",
            "part -= m",
            ("part = part - m", "torch.stack(parts, dim=1)", "changed"),
        ),
        ("part", "x.chunk(2)", "part += x.mean()", None),
        ("part", "x.chunk(2)", "part[0] = 1", None),
        ("part", "make().chunk(2)", "part += 1", None),
    ],
)
def test_parts_changed_in_a_loop(tmp_path, target, walked, write, made):
    path = tmp_path / "train.py"
    path.write_text(_PROGRAM.format(target=target, walked=walked, write=write))
    found = parts_collected(Frame(str(path), 4, "changed", is_user=True), "part")
    if made is None or found is None:
        assert found is made
    else:
        text = "\n".join(one for _, _, one in found.lines)
        assert made[0] in text
        assert made[1] in text
        assert found.meaning == made[2]


@each(
    "made, writes, read, joined",
    [
        ("a, b = x.chunk(2, 1)", ["a *= 2"], "x.sum()", ["a = a * 2", "x = torch.cat((a, b), dim=1)"]),
        ("a, b = x.unbind()", ["a.exp_()", "n = b.mean()", "b -= n"], "x", ["b = b - n\n    x = torch.stack((a, b))"]),
        ("a, b = torch.split(x, 3, dim=-1)", ["a += 1", "b = b.abs()"], "x", ["x = torch.cat((a, b), dim=-1)"]),
        ("a, b = x.chunk(2)", ["a *= 2"], "a, x.shape[0]", []),
        ("a, b = x.chunk(2)", ["a *= 2"], "a", []),
        ("a, b = x.chunk(2)", ["a *= x.mean()"], "x", []),
        ("a, *b = x.chunk(3)", ["a *= 2"], "x", []),
        ("a, b = halves(x)", ["a *= 2"], "x", []),
    ],
)
def test_named_parts_are_joined_where_the_whole_is_read(tmp_path, made, writes, read, joined):
    path, lines = tmp_path / "train.py", [made, *writes, f"return {read}"]
    path.write_text("import torch\ndef changed(x):\n" + "".join(f"    {one}\n" for one in lines))
    found = named_parts_joined(Frame(str(path), 4, "changed", is_user=True), "a")
    text = "" if found is None else "\n".join(one for _, _, one in found.lines)
    assert (found is not None) == bool(joined)
    assert all(one in text for one in joined)
