"""The documentation as a site: the generated reference, both languages, and what pages take from one another."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from cases import each
from example_programs import ROOT, load
from gradsan.diagnose.messages import codes_of
from gradsan.options import Options, spelled
from gradsan.text import LANGUAGES, Language, codes

hook = load(ROOT / "tools" / "reference_hook.py")
reference = hook.reference
words = sys.modules["reference.words"]
DOCS = ROOT / "docs"


def written(folder: Path) -> dict[str, tuple[str, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): (path.read_text("utf-8"), path.stat().st_mtime_ns) for path in files}


def test_every_wording_leads_to_the_codes_that_it_is_listed_with() -> None:
    listed = sys.modules["reference.message_page"].wordings()
    assert len(listed) > 100
    assert [words for words, codes in listed if not set(codes_of(words)) & set(codes)] == []
    assert [words for words, _ in listed if set(words) & set("^\\")] == []


def test_every_page_is_there_in_both_languages() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    pages = {path for path in pages if not path.startswith("reference/")} - {
        "architecture.md",
        "dependencies.md",
        "internals.md",
    }
    english = {path for path in pages if not path.endswith(".zh.md")}
    assert pages - english == {path.replace(".md", ".zh.md") for path in english}
    assert len(english) > 10


def test_the_reference_is_there_in_both_languages() -> None:
    english, chinese = (reference.pages(language) for language in LANGUAGES)
    assert list(english) == list(chinese)
    assert {"cli.md", "api.md", "json.md", "codes/index.md", "codes/GS111.md"} <= set(english)


def test_the_words_of_the_reference_are_there_in_both_languages() -> None:
    known = words._read("words.toml")
    assert [sorted(known[language]) for language in LANGUAGES] == [sorted(known["en"])] * 2


def test_docstrings_and_descriptions_that_are_shown_have_their_chinese() -> None:
    """Each missing text belongs into tools/reference/translations.toml, as ``en`` with its ``zh``; the others go."""
    reference.pages("zh")
    assert sorted(words.asked - set(words.translations())) == []
    assert sorted(set(words.translations()) - words.asked) == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_reference_leaves_nothing_out(language: Language) -> None:
    pages = reference.pages(language)
    assert [field.name for field in fields(Options) if f"| `{spelled(field.name)}` |" not in pages["cli.md"]] == []
    assert [entry.code for entry in codes() if f"({entry.code}.md)" not in pages["codes/index.md"]] == []
    assert [name for name in ("watch", "enable", "disable") if f"## gradsan.{name}\n" not in pages["api.md"]] == []


def test_codes_become_links_in_sentences_only() -> None:
    text = reference.pages("en")["codes/GS101.md"]
    assert text.startswith("# GS101 ")
    linked = sys.modules["reference.code_pages"]._linked("GS102, `GS102`, GS101, GS999\n", "GS101", {"GS101", "GS102"})
    assert linked == "[GS102](GS102.md), `GS102`, GS101, GS999\n"


def test_a_second_writing_touches_nothing_and_leaves_nothing_old(tmp_path: Path) -> None:
    reference.write(tmp_path)
    first = written(tmp_path)
    assert {"cli.md", "cli.zh.md", "codes/GS111.zh.md", "report.schema.json"} <= set(first)
    (tmp_path / "codes" / "GS000.md").write_text("old", encoding="utf-8")
    reference.write(tmp_path)
    assert written(tmp_path) == first


@each("page", sorted(DOCS.rglob("*.zh.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_included_parts_of_other_pages_exist(page: Path) -> None:
    filled = hook.on_page_markdown(page.read_text(encoding="utf-8"), config=type("Config", (), {"docs_dir": str(DOCS)}))
    assert "<!-- include" not in filled
    assert "<!-- program" not in filled


def test_chinese_has_the_programs_of_what_gradsan_does_not_see() -> None:
    english, chinese = (DOCS / f"blind-spots{ending}" for ending in (".md", ".zh.md"))
    filled = hook.on_page_markdown(chinese.read_text("utf-8"), config=type("Config", (), {"docs_dir": str(DOCS)}))
    programs = [text.split("```python\n")[1:] for text in (english.read_text("utf-8"), filled)]
    assert [part.partition("```")[0] for part in programs[1]] == [part.partition("```")[0] for part in programs[0]]


def test_an_include_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# One\n\ntext\n", encoding="utf-8")
    config = type("Config", (), {"docs_dir": str(tmp_path)})
    for line in ("<!-- include page.md part -->", "<!-- program page.md One -->"):
        with pytest.raises(ValueError, match=r"page\.md has no"):
            hook.on_page_markdown(line, config=config)


def test_lines_of_chinese_are_joined_outside_of_code() -> None:
    config = type("Config", (), {"docs_dir": str(DOCS)})
    joined = hook.on_page_markdown("一行\n二行，\n（三）\nEnglish\n四\n\n```text\n一\n二\n```\n", config=config)
    assert joined == "一行二行，（三）\nEnglish\n四\n\n```text\n一\n二\n```\n"


@each(
    ("html", "foreign"),
    [
        ('<script src="https://elsewhere.example/a.js">', True),
        ('<link rel="stylesheet" href="//elsewhere.example/a.css">', True),
        ('<a href="https://elsewhere.example/">', False),
        ('<img src="../a.png">', False),
    ],
)
def test_a_page_that_loads_from_elsewhere_is_an_error(html: str, foreign: bool) -> None:
    if foreign:
        with pytest.raises(ValueError, match="from elsewhere"):
            hook.on_post_page(html)
    else:
        hook.on_post_page(html)
