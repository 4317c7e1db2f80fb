"""Write the pictures of docs/how-to: what gradsan shows in a terminal (SVG), in a browser and in a notebook (PNG).

    python tools/screenshots.py docs/how-to/images [NAME …]      all, or those whose names begin so

The terminal's are drawn by rich. The browser's need playwright and Chromium; without them they are left as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """\
import torch

torch.manual_seed(0)
rnn = torch.nn.RNN(4, 4)
head = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.1)
h = torch.zeros(1, 1, 4)
for step in range(6):
    x = torch.randn(3, 1, 4)
    out, h_next = rnn(x, h)
    loss = head(out).square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    h = h_next
"""
TEST = """\
import torch

def test_gate():
    weight = torch.ones(3, requires_grad=True)
    gate = torch.sigmoid(weight)
    gate.data.clamp_(max=0.5)
    gate.sum().backward()
    assert weight.grad is not None
"""
CELL = "%%gradsan\nimport runpy\nrunpy.run_path('train.py')"
COLUMNS = 100

TERMINALS = {
    "terminal-run": "gradsan run train.py",
    "terminal-fix": "gradsan fix --steps 4 train.py",
    "terminal-explain": 'gradsan explain "Trying to backward through the graph a second time"',
    "terminal-lint": "gradsan lint train.py",
    "terminal-pytest": "pytest -q test_gate.py --gradsan",
}
"""A command for each picture of a terminal; those of ``gradsan`` are drawn in Chinese, too (``NAME-zh``)."""

BROWSERS = (
    ("report", "en", "light", ""),
    ("report-dark", "en", "dark", ".part-graph"),
    ("report-zh", "zh", "light", ""),
)
"""Name, language, colours, and a selector of what the picture begins at."""


def main(folder: Path, wanted: tuple[str, ...]) -> None:
    """Write the pictures into ``folder``."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "train.py").write_text(PROGRAM, encoding="utf-8")
        Path(place, "test_gate.py").write_text(TEST, encoding="utf-8")
        for name, command in TERMINALS.items():
            for language in ("en", "zh") if command.startswith("gradsan") else ("en",):
                called = name if language == "en" else f"{name}-{language}"
                if called.startswith(wanted):
                    picture = terminal(command, shown(command, language, Path(place)))
                    (folder / f"{called}.svg").write_text(picture, encoding="utf-8")
        if any(name.startswith(wanted) for name in (*(one[0] for one in BROWSERS), "notebook")):
            browsers(folder, Path(place), lambda name: name.startswith(wanted))


def shown(command: str, language: str, place: Path) -> str:
    """What ``command`` writes in ``place``, with its colours; of a traceback only its last line."""
    locale = {"en": "C.UTF-8", "zh": "zh_CN.UTF-8"}[language]
    settings = {"LC_ALL": locale, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    words = command.replace("gradsan", f"{sys.executable} -m gradsan", 1) if command.startswith("gradsan") else command
    words = words.replace("pytest", f"{sys.executable} -m pytest --color=yes -p no:cacheprovider", 1)
    done = subprocess.run(
        words, shell=True, cwd=place, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    text = re.sub(r"(?ms)^Traceback .*?^(?=\w+Error: )", "", done.stdout + done.stderr)
    return re.sub(r"[\d.]+s(?= )", "0.1s", text.replace(str(place) + "/", ""))


def terminal(command: str, output: str) -> str:
    """A terminal as SVG that loads nothing."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(output.rstrip("\n")))
        picture = console.export_svg(title=command, theme=DIMMED_MONOKAI, unique_id="gradsan")
    # rich names a font of a server's; the reader's own will do.
    picture = re.sub(r"@font-face \{.*?\}\n?", "", picture, flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE)


def browsers(folder: Path, place: Path, is_wanted: Callable[[str], bool]) -> None:
    """Photograph reports in a browser and in a notebook's cell."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("without playwright no picture of a browser is made", file=sys.stderr)
        return
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, language, scheme, selector in BROWSERS:
            if not is_wanted(name):
                continue
            words = ["run", "--quiet", "--lang", language, "--html", f"{language}.html", "train.py"]
            subprocess.run([sys.executable, "-m", "gradsan", *words], cwd=place, capture_output=True, check=False)
            page = browser.new_page(color_scheme=scheme, viewport={"width": 900, "height": 880})
            page.goto((place / f"{language}.html").as_uri())
            if selector:
                page.locator(selector).evaluate("one => one.scrollIntoView({behavior: 'instant'})")
                page.locator("canvas").evaluate("one => one.focus({preventScroll: true})")
                page.keyboard.press("ArrowRight")
                page.keyboard.press("ArrowRight")
            page.wait_for_timeout(300)
            page.screenshot(path=str(folder / f"{name}.png"))
        if is_wanted("notebook"):
            (place / "cell.html").write_text(in_a_notebook(place), encoding="utf-8")
            page = browser.new_page(viewport={"width": 900, "height": 760})
            page.goto((place / "cell.html").as_uri())
            page.wait_for_timeout(300)
            page.screenshot(path=str(folder / "notebook.png"))
        browser.close()


def in_a_notebook(place: Path) -> str:
    """A page with a cell as a notebook shows it: what was typed, and what gradsan displays below."""
    program = (
        "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "from IPython.utils.capture import capture_output\nimport gradsan\n"
        "shell = InteractiveShell.instance()\nshell.run_line_magic('load_ext', 'gradsan')\n"
        f"with capture_output() as captured:\n    shell.run_cell({CELL!r})\n"
        "print(captured.outputs[-1].data['text/html'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True, check=True)
    style = "font: 14px monospace; margin: 1rem; white-space: pre; background: #f5f5f5; padding: .6rem"
    cell = f'<div style="{style}">In [1]: {CELL}</div>'
    return f'<body style="margin: 0">{cell}<div style="margin: 1rem">{done.stdout}</div>'


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]) or ("",))
