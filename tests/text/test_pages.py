import ast
import itertools
import re
import traceback
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len

import gradsan
import gradsan.text
from gradsan.catalogue import recognise
from gradsan.text import LANGUAGES, codes, page, resolve

SECTIONS = {
    "en": (
        "What happened",
        "A small failing example",
        "The right version",
        "When it is not a bug",
        "Common wrong advice",
    ),
    "zh": ("发生了什么", "最小复现", "正确写法", "什么情况下不是 bug", "常见的错误建议"),
}
FAILING, RIGHT = 1, 2
CODE_COLUMNS = 78
"""A terminal of 80 columns less rich's padding."""

SILENT = {*(f"GS2{number:02}" for number in (*range(1, 9), *range(10, 19))), "GS420", "GS421", "GS422"}
"""Codes whose failing example raises nothing: that is what they are about."""
WARNED = {"GS409", "GS416", "GS418", "GS419", "GS517", "GS518"}
"""Codes of which PyTorch only warns."""

CODES = [entry.code for entry in codes()]
every_page = pytest.mark.parametrize(("language", "code"), list(itertools.product(LANGUAGES, CODES)))
every_code = pytest.mark.parametrize("code", CODES)


def sections(markdown):
    """The page's sections in order, as (heading, body)."""
    parts = re.split(r"^## (.*)\n", markdown, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def blocks(body):
    return re.findall(r"^```python\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)


def execute(source, name):
    namespace = {"__name__": "page"}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def examples(*, failing):
    for language in LANGUAGES:
        for code in CODES:
            for index, (_, body) in enumerate(sections(page(code, language))):
                for number, source in enumerate(blocks(body)):
                    if (index == FAILING and code not in SILENT | WARNED) == failing:
                        yield pytest.param(source, index, id=f"{language}-{code}-section{index + 1}-{number + 1}")


def test_there_is_a_page_for_every_code_in_every_language():
    assert {"GS101", "GS102", "GS103", "GS104", "GS105", "GS110", "GS111", "GS112", "GS120", "GS121"} <= set(CODES)
    for language in LANGUAGES:
        folder = Path(gradsan.text.__file__).parent / language
        assert sorted(file.stem for file in folder.glob("*.md")) == CODES


@every_page
def test_head_and_sections(language, code):
    markdown = page(code, language)
    lines = markdown.splitlines()
    assert re.fullmatch(rf"# {code} .*[^.。]", lines[0])
    assert re.fullmatch(r"`[a-z]+(_[a-z]+)*`", lines[2])
    assert tuple(heading for heading, _ in sections(markdown)) == SECTIONS[language]
    assert all(body.strip() for _, body in sections(markdown))


@every_code
def test_both_languages_show_the_same_code(code):
    english, chinese = sections(page(code, "en")), sections(page(code, "zh"))
    for (_, body), (_, other) in zip(english, chinese, strict=True):
        trees = [[ast.dump(ast.parse(source)) for source in blocks(text)] for text in (body, other)]
        assert trees[0] == trees[1]


@every_code
def test_both_languages_make_the_same_points(code):
    for (heading, body), (_, other) in zip(sections(page(code, "en")), sections(page(code, "zh")), strict=True):
        points = [len(re.findall(r"^- ", text, re.MULTILINE)) for text in (body, other)]
        assert points[0] == points[1], heading


@every_code
def test_both_languages_name_the_same_cause(code):
    assert page(code, "en").splitlines()[2] == page(code, "zh").splitlines()[2]


def test_chinese_comments_are_chinese():
    for code in CODES:
        english, chinese = (
            [comment for source in blocks(page(code, language)) for comment in re.findall(r"# (.*)", source)]
            for language in LANGUAGES
        )
        assert len(english) == len(chinese)
        for comment, translated in zip(english, chinese, strict=True):
            assert comment == "RuntimeError" or re.search(r"[\u4e00-\u9fff]", translated), translated


@pytest.mark.parametrize(("source", "section"), list(examples(failing=True)))
def test_failing_examples_fail_where_they_say(source, section):
    with pytest.raises(RuntimeError) as caught:
        execute(source, "<example>")
    message = str(caught.value)
    assert (
        isinstance(caught.value, gradsan.GradsanError)
        or "modified by an inplace operation" in message
        or recognise([kind.__name__ for kind in type(caught.value).__mro__], message)
    )
    line = next(f.lineno for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == "<example>")
    assert "RuntimeError" in source.splitlines()[line - 1].partition("#")[2]


@pytest.mark.parametrize(("source", "section"), list(examples(failing=False)))
def test_all_other_examples_run_and_check_themselves(source, section):
    execute(source, "<example>")
    checks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr == "assert_close")
    ]
    assert checks


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_silent_example_is_wrong_and_raises_without_the_hooks(language):
    (source,) = blocks(sections(page("GS201", language))[FAILING][1])
    found = execute(source, "<example>")
    assert not torch.allclose(found["hidden"], found["expected"])
    without = source.replace("with save_on_cpu():", "if True:")
    assert without != source
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        execute(without, "<example>")


@every_page
def test_right_versions_compare_gradients(language, code):
    right = "".join(blocks(sections(page(code, language))[RIGHT][1]))
    assert "assert_close" in right


@every_page
def test_examples_are_seeded_if_they_draw_numbers(language, code):
    for source in blocks(page(code, language)):
        draws = re.search(r"torch\.randn?\(|nn\.(Linear|RNN|Embedding)\(", source)
        assert not draws or "torch.manual_seed(0)" in source


@every_page
def test_code_fits_a_terminal(language, code):
    for source in blocks(page(code, language)):
        assert max(map(cell_len, source.splitlines())) <= CODE_COLUMNS


@every_page
def test_no_page_names_a_workplace(language, code):
    assert not re.search(r"/work\b|/tmp\b|/home/|/root\b|farm-", page(code, language))


def test_english_pages_are_ascii():
    assert all(page(code, "en").isascii() for code in CODES)


@every_code
def test_codes_that_a_page_refers_to_exist(code):
    for language in LANGUAGES:
        assert set(re.findall(r"GS\d{3}", page(code, language))) <= set(CODES)


def test_codes_are_sorted_and_slugs_unique():
    assert sorted(CODES) == CODES
    assert len({entry.slug for entry in codes()}) == len(CODES)
    assert [(e.code, e.slug) for e in codes("zh")] == [(e.code, e.slug) for e in codes("en")]


def test_an_unknown_language_gets_the_english_page():
    assert page("GS111", "fr") == page("GS111", "en")


@pytest.mark.parametrize("asked", ["GS111", "gs111", " Gs111 ", "state_carried_over", "STATE-carried-over"])
def test_resolve_takes_codes_and_slugs_in_any_case(asked):
    assert resolve(asked) == "GS111"


@pytest.mark.parametrize("asked", ["", "GS999", "messages", "GS111.md", "../en/GS111"])
def test_resolve_knows_only_codes_with_a_page(asked):
    assert resolve(asked) is None


def test_page_of_an_unknown_code():
    with pytest.raises(KeyError, match="GS999"):
        page("GS999", "en")
