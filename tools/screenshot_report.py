"""Write the pictures of docs/how-to: an example's report in light, dark and Chinese. Needs playwright and Chromium.

python tools/screenshot_report.py docs/how-to/images
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

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
PICTURES = (
    ("report", "en", "light", ""),
    ("report-dark", "en", "dark", ".part-graph"),
    ("report-zh", "zh", "light", ""),
)


def main(folder: Path) -> None:
    """Run the example in both languages and photograph its reports; a selector is what the picture begins at."""
    folder.mkdir(parents=True, exist_ok=True)
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        Path(place, "train.py").write_text(PROGRAM, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, language, scheme, selector in PICTURES:
            words = ["run", "--quiet", "--lang", language, "--html", f"{language}.html", "train.py"]
            subprocess.run([sys.executable, "-m", "gradsan", *words], cwd=place, capture_output=True, check=False)
            page = browser.new_page(color_scheme=scheme, viewport={"width": 900, "height": 880})
            page.goto(Path(place, f"{language}.html").as_uri())
            if selector:
                page.locator(selector).evaluate("one => one.scrollIntoView({behavior: 'instant'})")
                page.locator("canvas").focus()
                page.keyboard.press("ArrowRight")
                page.keyboard.press("ArrowRight")
            page.wait_for_timeout(300)
            page.screenshot(path=str(folder / f"{name}.png"))
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
