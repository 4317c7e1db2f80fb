"""A view taken again before it is written: only while its base is what it was made of."""

from __future__ import annotations

from pathlib import Path

from cases import each
from gradsan import source
from gradsan.model import Frame

PROGRAM = """\
out = zeros(2, 8)
top, rest = out[:, :4], out[:, 4:]
top[:] = f(x)
{between}
rest += g(x)
"""


@each(
    "between, expected",
    [("y = out.mean()", "rest = out[:, 4:]"), ("out = out * 2", None), ("out.mul_(2)", None)],
)
def test_the_base_is_the_same(between: str, expected: str | None, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.format(between=between), encoding="utf-8")
    change = source.view_again(Frame(str(file), 5, "<module>", 1, 5, 13, True), "rest")
    assert (None if change is None else change.new) == expected
