"""Writes past autograd by second names, ``.data`` and decorated functions: lines that autograd records."""

from cases import each
from gradsan.model import Frame
from gradsan.source import recorded_by_name

_FUNCTION = "def scaled(net, z, limit):\n{lines}\n    return net(z)"
_MASKED = ["z = z.masked_fill(z < 0, 0)"]


@each(
    "lines, written, made",
    [
        ("d = z.detach()\nd /= d.norm()", {1: "div_"}, ["", "z = z / z.norm()"]),
        ("d = z.data\nd[d < 0] = 0\nd.mul_(2)", {1: "__setitem__", 2: "mul_"}, ["", *_MASKED, "z = z.mul(2)"]),
        ("z.data[z.data < 0] = 0", {0: "__setitem__"}, _MASKED),
        ("z.detach().add_(\n    z.data.mean())", {0: "add_"}, ["z = z.add(", "    z.mean())"]),
        ("d = z.detach()\nd.mul_(2)\nkept = d + 1", {1: "mul_"}, []),
        ("d = z.detach()\nd.mul_(2)\nd = z.detach()", {1: "mul_"}, []),
        ("d = z.detach()\nother(d)", {1: "mul_"}, []),
        ("d, e = z.detach(), 1; d.mul_(2)", {0: "mul_"}, []),
        ("z.mul_(2)", {0: "mul_"}, []),
        ("d = z.detach()\nz = net(z)\nd.mul_(2)", {2: "mul_"}, []),
        ("with torch.no_grad():\n    d = z.detach()\n    d.mul_(2)", {2: "mul_"}, []),
        ("with torch.no_grad():\n    z.data.mul_(2)", {1: "mul_"}, []),
        ("if limit:\n    d = z.detach()\nd.mul_(2)", {2: "mul_"}, []),
        ("o = limit.detach()\nz.data.mul_(2)\no.mul_(2)", {1: "mul_", 2: "mul_"}, []),
    ],
)  # fmt: skip
def test_writes_by_a_second_name_are_bound_to_the_own_one(lines, written, made, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(_FUNCTION.format(lines="\n".join(f"    {line}" for line in lines.split("\n"))))
    found = recorded_by_name([(Frame(str(file), at + 2, "scaled"), op) for at, op in written.items()])
    assert [text.strip() if text.startswith("    z") else text.removeprefix("    ") for _, _, text in found] == made


@each(
    "head, body, returned, is_left",
    [
        ("@torch.no_grad()\n", "", "z", True),
        ("@torch.no_grad()\n", '    """Of mean zero."""\n', "z * 2", True),
        ("@torch.no_grad()\n", "    teacher.update(z)\n", "z", False),
        ("@torch.no_grad()\n", "", "None", False),
        ("@torch.no_grad()\n@staticmethod\n", "", "z", False),
        ("@torch.no_grad()\n", "    d = z.detach()\n", "z", False),
        ("", "", "z", False),
    ],
)
def test_a_function_that_only_computes_leaves_no_grad(head, body, returned, is_left, tmp_path):
    file = tmp_path / "program.py"
    text = f"import torch\n\n{head}def centred(teacher, z):\n{body}    z -= z.mean(0)\n    return {returned}\n"
    file.write_text(text)
    line = text[: text.index("    z -=")].count("\n") + 1
    found = recorded_by_name([(Frame(str(file), line, "centred"), "sub_")])
    assert [one[1:] for one in found] == ([(3, ""), (line, "    z = z - z.mean(0)")] if is_left else [])
