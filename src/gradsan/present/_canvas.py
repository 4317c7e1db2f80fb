"""Canvas of a drawn report: its width, colours and language, and drawing functions that all parts share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from gradsan import text
from gradsan.model import Diagnosis, Gradient, Message, NamedTensor, Seen
from gradsan.present._cells import Glyphs, width_of, wrap

_WIDE = 100.0
"""The ratio of largest to smallest number from which a curve is drawn in logarithms."""


def heights(numbers: Sequence[float]) -> list[float]:
    """Return the height of each of the finite ``numbers``, from 0 to 1; of their logarithms if they vary much."""
    low, high = min(numbers), max(numbers)
    if low > 0 and high / low > _WIDE:
        numbers, low, high = [math.log(one) for one in numbers], math.log(low), math.log(high)
    return [(one - low) / (high - low) if high > low else 0.0 for one in numbers]


def sparkline(numbers: Sequence[float], levels: str) -> str:
    """Return one character of ``levels``, from lowest to highest, for each of the ``numbers``."""
    return "".join(levels[round(height * (len(levels) - 1))] for height in heights(numbers))


def points(numbers: Sequence[float], width: int, height: int) -> str:
    """Return ``numbers`` as the points of a polyline in a box of ``width`` by ``height``, origin at the top left."""
    step = width / max(len(numbers) - 1, 1)
    return " ".join(f"{at * step:.1f},{height * (1 - one):.1f}" for at, one in enumerate(heights(numbers)))


_LONGEST_NAME = 44
_LONG_NAME = re.compile(r"(?!torch\.)\b[A-Za-z_]\w*(?:\.\w+|\[[^\]\s]*\])+")

SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
ROLE_STYLE = {
    **dict.fromkeys(("saved", "created"), "cyan"),
    **dict.fromkeys(("written", "freed", "suspect", "origin"), "yellow"),
    **dict.fromkeys(("note", "path"), "blue"),
    **dict.fromkeys(("used", "noticed"), "red"),
    "bridge": "magenta",
}
FRAME_STYLE = "blue"
QUIET_STYLE = "dim"
NEW_CODE_STYLE = "green"


def word(language: str, name: str, /, **values: Any) -> str:
    """Return one of the presenters' own words, from the table ``ui`` of the text package."""
    return text.say(Message(f"ui.{name}", values), language)


@dataclass(frozen=True, slots=True)
class Canvas:
    """Settings for drawing one diagnosis. ``digits`` is the width of its line numbers, ``width`` in cells.

    ``editor`` is the URL of a line in the reader's editor, None if there is none.
    """

    language: str
    width: int
    digits: int
    glyphs: Glyphs
    cwd: Path | None
    editor: str | None = None

    @property
    def columns(self) -> int:
        """Cells to the right of the bar."""
        return self.width - self.indent

    @property
    def indent(self) -> int:
        """Cells up to and including the bar and its space."""
        return self.digits + 2 + width_of(self.glyphs.bar)

    def word(self, name: str, /, **values: Any) -> str:
        """Return one of the presenters' own words."""
        return word(self.language, name, **values)

    def say(self, message: Message) -> str:
        """Return a message in the language of this report."""
        return text.say(message, self.language)

    def say_short(self, message: Message) -> str:
        """Return a message with long names of parameters shortened from the left."""
        return _LONG_NAME.sub(
            lambda found: _shortened(found[0], min(_LONGEST_NAME, self.columns - 4)), self.say(message)
        )

    def head(self, name: str) -> str:
        """Return ``name`` as a heading: with a colon."""
        return name + self.word("colon")

    def row(self, line: int | None, *parts: tuple[str, str]) -> Text:
        """Return a row beside the bar, with its line number where it has one; parts are (text, style)."""
        number = "" if line is None else str(line)
        return Text.assemble((f"{number:>{self.digits}} {self.glyphs.bar} ", FRAME_STYLE), *parts)

    def paragraph(self, head: tuple[str, str], body: str, style: str = "", indent: int = 0) -> list[Text]:
        """Return ``body`` after ``head``, wrapped; further lines are aligned with the beginning of the body.

        If the head takes more than half of the width, they are indented by four cells from ``indent``.
        """
        begin = indent + width_of(head[0])
        hang = begin if begin <= self.width // 2 else indent + 4
        first, *rest = wrap(body, self.width - hang, self.width - begin)
        rows = [Text.assemble(" " * indent, head, (first, style))]
        rows.extend(Text.assemble(" " * hang, (line, style)) for line in rest)
        return rows

    def remark(self, name: str, body: str, style: str = "") -> list[Text]:
        """Return a paragraph such as ``= why: ...`` below the snippets."""
        return self.paragraph((f"= {self.head(self.word(name))}", "bold"), body, style, indent=self.digits + 1)


def describe_losses(diagnosis: Diagnosis, canvas: Canvas) -> tuple[str, str] | None:
    """Return a curve of the losses before a non-finite value, and words; None for fewer than two losses."""
    losses = [] if diagnosis.nonfinite is None else [one for one in diagnosis.nonfinite.losses if math.isfinite(one)]
    if len(losses) < 2:
        return None
    words = canvas.word("losses_of", count=len(losses), first=f"{losses[0]:.3g}", last=f"{losses[-1]:.3g}")
    return sparkline(losses, canvas.glyphs.levels), words


def _shortened(name: str, limit: int) -> str:
    """Return the end of a dotted name that fits: ``…layers.1.self_attn.v_proj.weight``."""
    parts = name.split(".")
    while len(name) > limit and len(parts) > 1:
        parts = parts[1:]
        name = "…" + ".".join(parts)
    return name


def describe_tensor(tensor: NamedTensor, canvas: Canvas) -> str:
    """Return name, dtype, shape, device and saving operation of the tensor, as far as they are informative."""
    # For a freed tensor only the shape may be known.
    kind = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("? ")
    is_known = tensor.dtype != "?" or tensor.shape
    said = canvas.word("tensor_named", name=tensor.name, kind=kind) if tensor.name and is_known else tensor.name or kind
    if tensor.transposed:
        said = canvas.word("tensor_transposed", tensor=said)
    if tensor.device not in ("cpu", "?"):
        said = canvas.word("tensor_on", tensor=said, device=tensor.device)
    if tensor.op and tensor.operand:
        return canvas.word("tensor_kept_as", tensor=said, op=tensor.op, operand=tensor.operand)
    if tensor.op:
        return canvas.word("tensor_kept", tensor=said, op=tensor.op)
    return said


def describe_gradient(gradient: Gradient, silent: bool, canvas: Canvas) -> str | None:
    """Return the outcome for the gradient; None if PyTorch raised and there is nothing to add."""
    if gradient.status == "wrong":
        if gradient.relative_error is not None:
            return canvas.word("gradient_wrong_by", error=gradient.relative_error)
        return canvas.word("gradient_wrong")
    if gradient.status == "right":
        return canvas.word("gradient_right")
    return canvas.word("gradient_silent") if silent else None


def describe_watched(seen: Seen, canvas: Canvas) -> str:
    """Return the counts of events, of processes if there are several, and the memory of copies on devices."""
    counts = {"saves": seen.saves, "writes": seen.writes, "backwards": seen.backwards, "steps": seen.steps}
    counts |= {"processes": seen.processes} if seen.processes > 1 else {}
    said = [canvas.word(name, count=count) for name, count in counts.items()]
    for one in seen.copies:
        name = "copies_on_and_without" if one.left_out else "copies_on"
        said.append(canvas.word(name, bytes=one.bytes, device=one.device, left_out=one.left_out))
    return canvas.word("comma").join(said)
