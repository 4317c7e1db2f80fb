"""Lines that add to something kept, and the same lines with the value detached."""

from cases import each
from gradsan.model import Frame
from gradsan.source import additions


@each(
    ("line", "value", "changed"),
    [
        ("total.append(loss)", "loss", "total.append(loss.detach())"),
        ("total += loss", "loss", "total += loss.detach()"),
        ("total += loss / n", "(loss / n)", "total += (loss / n).detach()"),
        ("total += [loss]", "loss", "total += [loss.detach()]"),
        ("total = total + loss", "loss", "total = total + loss.detach()"),
        ("total = -loss + total", "(-loss)", "total = (-loss).detach() + total"),
        ("total = torch.cat([total, out])", "out", "total = torch.cat([total, out.detach()])"),
        ("total = torch.cat((out, total), 1)", "out", "total = torch.cat((out.detach(), total), 1)"),
    ],
)
def test_the_added_value(tmp_path, line, value, changed):
    (tmp_path / "program.py").write_text(line + "\n")
    (found,) = additions(Frame(str(tmp_path / "program.py"), 1, "<module>"), "total")
    assert (found.value, found.change.new) == (value, changed)


@each(
    "line",
    [
        "total = total * loss",
        "total = loss + other",
        "total = total + total",
        "total += [one, other]",
        "total = torch.cat([total, one, other])",
        "other = total + loss",
    ],
)
def test_nothing_or_several_values_added(tmp_path, line):
    (tmp_path / "program.py").write_text(line + "\n")
    assert additions(Frame(str(tmp_path / "program.py"), 1, "<module>"), "total") == ()
