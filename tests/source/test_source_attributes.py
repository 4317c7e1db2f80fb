"""Reads of a module's attribute in its forward; none is claimed where others may read it."""

import pytest

from gradsan.model import Frame
from gradsan.source import uses_in

_MODULE = """
class Net(nn.Module):
    def forward(self, x):
{body}
    def helper(self, x):
        return [self.layer(one) for one in x]
"""


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("return x", ()),
        ("return self.other(x)", ()),
        ("return self.layer(x)", (4,)),
        ("return [self.layer(one) for one in x]", (4,)),
        ("return map(lambda one: self.layer(one), x)", (4,)),
        ("return self.helper(x)", (6,)),
        ("return run(self, x)", None),
        ("return getattr(self, name)(x)", None),
        ("return super().forward(x)", None),
        ("return sum(one(x) for one in self.children())", None),
    ],
)
def test_where_a_forward_reads_an_attribute(tmp_path, body, lines):
    path = tmp_path / "net.py"
    path.write_text(_MODULE.format(body=f"        {body}"))
    found = uses_in(Frame(str(path), 3, "Net.forward"), "layer")
    assert lines == (None if found is None else tuple(one.frame.line for one in found))


def test_a_forward_may_be_inherited(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("class Net(Base):\n    def forward(self, x):\n        return self.encode(x)\n")
    assert uses_in(Frame(str(path), 2, "Net.forward"), "layer") is None
