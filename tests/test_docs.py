"""The pages for people: what they link to and what they name is there; the dependencies are those of the project."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from cases import each
from example_programs import load
from gradsan._session import OLDEST_TORCH

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "gradsan"
GENERATED = ROOT / "docs" / "reference"
"""Made when the site is built; test_site.py looks at it, and the strict build at the links that lead there."""
WRITTEN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if GENERATED not in page.parents]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN, *sorted((ROOT / "examples").rglob("*.md"))]


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    targets = {link: (page.parent / link).resolve() for link in links}
    assert [link for link, file in targets.items() if not file.exists() and GENERATED not in file.parents] == []


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_a_workplace(page: Path) -> None:
    assert not re.search(r"/work\b|/tmp\b|/home/|/root\b|farm-|\.venv/lib", page.read_text(encoding="utf-8"))


def test_the_picture_of_the_house_names_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+/|[\w/]*\w\.(?:py|c|toml|json|md))`", text))
    assert len(named) > 30
    places = [ROOT, SOURCES, *(folder for folder in SOURCES.rglob("*") if folder.is_dir())]
    places += [ROOT / "docs", ROOT / "tests", *(folder for folder in (ROOT / "tests").iterdir() if folder.is_dir())]
    assert sorted(name for name in named if not any((place / name).exists() for place in places)) == []


def test_every_package_and_module_is_in_the_picture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {f"{path.name}/" for path in SOURCES.iterdir() if any(path.glob("*.py"))}
    names |= {path.name for path in SOURCES.glob("*.py") if not path.name.startswith("__")}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def packages(table: str) -> set[str]:
    """The names in a list of requirements in pyproject.toml, as written there."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [found] = re.findall(rf"^{table} = (\[.*?\]$)", text, re.MULTILINE | re.DOTALL)
    return {re.split(r"[<>=; ]", item)[0].lower() for item in ast.literal_eval(found) if isinstance(item, str)}


def listed(heading: str) -> set[str]:
    """The packages in the table below a heading of docs/dependencies.md."""
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return {name.lower() for name in re.findall(r"^\| (\S+) ≥", section, re.MULTILINE)}


@pytest.mark.parametrize(
    ("heading", "table"), [("To run", "dependencies"), ("To test", "test"), ("To document", "docs")]
)
def test_every_dependency_has_its_reason(heading: str, table: str) -> None:
    assert listed(heading) == packages(table)


def test_imports_are_declared_dependencies() -> None:
    imported: dict[str, set[Path]] = {}
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                imported.setdefault(name.partition(".")[0], set()).add(file)
    foreign = imported.keys() - set(sys.stdlib_module_names) - {"gradsan", "gradsan_start"}
    # A framework is imported by the module that bears its name, and by nothing else.
    frameworks = {name for name in foreign if imported[name] == {SOURCES / "integrations" / f"{name}.py"}}
    assert all(name in packages(name) for name in frameworks)
    # For the type checker only; which TOML reader is imported is decided by the version of Python.
    assert foreign - frameworks - {"typing_extensions"} == {
        {"markdown-it-py": "markdown_it"}.get(name, name) for name in packages("dependencies") - {"tomli"}
    }


def test_the_page_on_versions_has_the_floors_and_a_row_for_the_oldest_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [torch] = re.findall(r'"torch>=([\d.]+)"', project)
    [python] = re.findall(r'requires-python = ">=([\d.]+)"', project)
    assert tuple(map(int, torch.split("."))) == OLDEST_TORCH
    english, chinese = (ROOT / "docs" / f"compatibility{end}" for end in (".md", ".zh.md"))
    text = english.read_text(encoding="utf-8")
    assert f"needs torch {torch} or newer and Python {python} or newer" in text
    assert f"needs torch {torch} or newer and Python {python} or newer" in (ROOT / "README.md").read_text("utf-8")
    assert f"需要 torch {torch} 或更新、Python {python} 或更新" in chinese.read_text(encoding="utf-8")

    matrix = load(ROOT / "tools" / "matrix.py")
    columns = [part.name for part in matrix.PARTS]
    head, _, *rows = text.partition("<!-- versions:start -->\n")[2].partition("\n<!-- versions:end -->")[0].splitlines()
    assert head == f"| torch | Python | {' | '.join(columns)} | commit |"
    cells = [row.strip("| ").split(" | ") for row in rows]
    told = re.compile(r"all \d+(, \d+ skipped)?|\d+ of \d+(, \d+ skipped)?|not run")
    assert [row for row in cells if len(row) != 3 + len(columns) or not all(map(told.fullmatch, row[2:-1]))] == []
    assert all(re.fullmatch(r"[0-9a-f]{7,}\+?( [0-9a-f]{7,}\+?)*", row[-1]) for row in cells)
    versions = [tuple(int(part) for one in row[:2] for part in one.split(".")) for row in cells]
    assert versions == sorted(set(versions))
    assert ".".join(map(str, versions[0][:2])) == torch
    failed = text.partition("<!-- failed:start -->\n")[2].partition("\n<!-- failed:end -->")[0]
    assert ("- torch" in failed) == any(" of " in cell for row in cells for cell in row)

    explained = re.compile(r"^- \*\*([\w-]+)\*\*", re.MULTILINE)
    for page in (english, chinese):
        assert explained.findall(page.read_text(encoding="utf-8")) == columns
    included = re.findall(r"^<!-- include compatibility.md (\w+) -->$", chinese.read_text("utf-8"), re.MULTILINE)
    assert included == list(matrix.tables(ROOT / "no such folder"))
    for test in {test for part in matrix.PARTS for test in part.tests if not test.startswith("-")}:
        assert (ROOT / test).exists()


def test_every_surface_has_its_picture_which_loads_nothing() -> None:
    screenshots = load(ROOT / "tools" / "screenshots.py")
    made = {f"{name}{suffix}.svg" for name in screenshots.TERMINALS for suffix in ("", "-zh")}
    made = (made - {"terminal-pytest-zh.svg"}) | {f"{one[0]}.png" for one in screenshots.BROWSERS} | {"notebook.png"}
    folder = ROOT / "docs" / "how-to" / "images"
    assert {file.name for file in folder.iterdir()} == made
    pages = {file: file.read_text(encoding="utf-8") for file in (ROOT / "docs" / "how-to").glob("*.md")}
    assert sorted(name for name in made if not any(f"(images/{name})" in text for text in pages.values())) == []
    for file in folder.glob("*.svg"):
        picture = file.read_text(encoding="utf-8")
        assert re.findall(r"@font-face|@import|url\((?!#)|href=|Traceback|/tmp/", picture) == []
        assert "usage:" not in picture
