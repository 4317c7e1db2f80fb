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
from forked import call_forked
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

SILENT = {
    *(f"GS60{last}" for last in range(1, 6)),
    *(f"GS2{number:02}" for number in (*range(1, 9), *range(10, 24))),
    "GS420",
    "GS421",
    "GS422",
    "GS423",
    "GS424",
    "GS425",
    "GS426",
    "GS427",
    *(f"GS70{last}" for last in range(1, 6)),
}
"""Codes whose failing example raises nothing: that is what they are about."""
WARNED = {"GS409", "GS416", "GS418", "GS419", "GS517", "GS518"}
"""Codes of which PyTorch only warns."""

CODES = [entry.code for entry in codes()]
PAGES = list(itertools.product(LANGUAGES, CODES))
OWN_PROCESS = re.compile(r"torch\.distributed|torch\.compile|threading|multiprocessing")
"""What may hang or leave something behind in the process that runs it."""


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


def fault_of_failing(source):
    """What is wrong with an example that is to fail where a comment says so, with an error that gradsan knows."""
    try:
        execute(source, "<example>")
    except (RuntimeError, ValueError) as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        message = str(error)
        is_known = isinstance(error, gradsan.GradsanError) or "modified by an inplace operation" in message
        if not (is_known or recognise(kinds, message)):
            return f"unknown message: {message}"
        line = next(f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<example>")
        text = source.splitlines()[line - 1]
        said = "ValueError" if isinstance(error, ValueError) else "RuntimeError"
        return None if said in text.partition("#")[2] else f"fails at line {line}: {text}"
    return "does not fail"


def fault_of_other(source):
    """What is wrong with an example that is to run to its end and to check itself."""
    nodes = list(ast.walk(ast.parse(source)))
    if not any(isinstance(node, ast.Assert) or getattr(node, "attr", "") == "assert_close" for node in nodes):
        return "checks nothing"
    try:
        execute(source, "<example>")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def faults_of(examples):
    """What is wrong with examples, given as (name, whether it is to fail, source); by name."""
    faults = {name: (fault_of_failing if fails else fault_of_other)(source) for name, fails, source in examples}
    return {name: fault for name, fault in faults.items() if fault is not None}


def test_there_is_a_page_for_every_code_in_every_language():
    assert {"GS101", "GS102", "GS103", "GS104", "GS105", "GS110", "GS111", "GS112", "GS120", "GS121"} <= set(CODES)
    for language in LANGUAGES:
        folder = Path(gradsan.text.__file__).parent / language
        assert sorted(file.stem for file in folder.glob("*.md")) == CODES


def test_head_and_sections():
    def is_well_formed(language, code):
        markdown = page(code, language)
        lines = markdown.splitlines()
        return (
            re.fullmatch(rf"# {code} .*[^.。]", lines[0])
            and re.fullmatch(r"`[a-z]+(_[a-z]+)*`", lines[2])
            and tuple(heading for heading, _ in sections(markdown)) == SECTIONS[language]
            and all(body.strip() for _, body in sections(markdown))
        )

    assert [one for one in PAGES if not is_well_formed(*one)] == []


def test_both_languages_show_the_same_code_make_the_same_points_and_name_the_same_cause():
    def shown(code, language):
        """All that must not differ; a comment may, but where it says that a line fails."""
        markdown = page(code, language)
        bodies = [body for _, body in sections(markdown)]
        sources = [blocks(body) for body in bodies]
        return (
            markdown.splitlines()[2],
            [len(re.findall(r"^- ", body, re.MULTILINE)) for body in bodies],
            [[ast.dump(ast.parse(one)) for one in found] for found in sources],
            [
                [
                    one.partition("#")[0]
                    for one in "\n".join(found).splitlines()
                    if "RuntimeError" in one or "# ValueError" in one
                ]
                for found in sources
            ],
        )

    assert [code for code in CODES if shown(code, "en") != shown(code, "zh")] == []


def test_chinese_comments_are_chinese():
    for code in CODES:
        english, chinese = (
            [comment for source in blocks(page(code, language)) for comment in re.findall(r"# (.*)", source)]
            for language in LANGUAGES
        )
        assert len(english) == len(chinese)
        for comment, translated in zip(english, chinese, strict=True):
            assert comment in ("RuntimeError", "ValueError") or re.search(r"[\u4e00-\u9fff]", translated), translated


def test_examples_fail_where_they_say_and_all_others_run_to_their_end_and_check_themselves():
    """The English ones: their code is that of the Chinese ones."""
    examples = [
        (f"{code}, section {index + 1}, example {number}", index == FAILING and code not in SILENT | WARNED, source)
        for code in CODES
        for index, (_, body) in enumerate(sections(page(code, "en")))
        for number, source in enumerate(blocks(body), 1)
    ]
    apart = [one for one in examples if OWN_PROCESS.search(one[2])]
    assert len(examples) >= 2 * len(CODES)
    assert faults_of([one for one in examples if one not in apart]) | call_forked(faults_of, apart) == {}


def test_the_silent_example_is_wrong_and_raises_without_the_hooks():
    (source,) = blocks(sections(page("GS201", "en"))[FAILING][1])
    found = execute(source, "<example>")
    assert not torch.allclose(found["hidden"], found["expected"])
    without = source.replace("with save_on_cpu():", "if True:")
    assert without != source
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        execute(without, "<example>")


def test_right_versions_compare_gradients():
    rights = {one: "".join(blocks(sections(page(one[1], one[0]))[RIGHT][1])) for one in PAGES}
    assert [one for one, source in rights.items() if "assert_close" not in source] == []


def all_blocks():
    return [(language, code, source) for language, code in PAGES for source in blocks(page(code, language))]


def test_examples_are_seeded_if_they_draw_numbers():
    draws = re.compile(r"torch\.randn?\(|nn\.(Linear|RNN|Embedding)\(")
    unseeded = [one for one in all_blocks() if draws.search(one[2]) and "torch.manual_seed(0)" not in one[2]]
    assert unseeded == []


def test_examples_that_make_a_process_group_end_it():
    makers = [one for one in all_blocks() if "init_process_group(" in one[2]]
    assert makers
    assert [one for one in makers if "dist.destroy_process_group()" not in one[2]] == []


def test_code_fits_a_terminal():
    assert [one for one in all_blocks() if max(map(cell_len, one[2].splitlines())) > CODE_COLUMNS] == []


def test_no_page_names_a_workplace():
    assert [one for one in PAGES if re.search(r"/work\b|/tmp\b|/home/|/root\b|farm-", page(one[1], one[0]))] == []


def test_english_pages_are_ascii():
    assert all(page(code, "en").isascii() for code in CODES)


def test_codes_that_a_page_refers_to_exist():
    assert {found for one in PAGES for found in re.findall(r"GS\d{3}", page(one[1], one[0]))} <= set(CODES)


def test_codes_are_sorted_and_slugs_unique():
    assert sorted(CODES) == CODES
    assert len({entry.slug for entry in codes()}) == len(CODES)
    assert [(e.code, e.slug) for e in codes("zh")] == [(e.code, e.slug) for e in codes("en")]


def test_an_unknown_language_gets_the_english_page():
    assert page("GS111", "fr") == page("GS111", "en")


def test_resolve_takes_codes_and_slugs_in_any_case():
    asked = ("GS111", "gs111", " Gs111 ", "state_carried_over", "STATE-carried-over")
    assert {one: resolve(one) for one in asked} == dict.fromkeys(asked, "GS111")


def test_resolve_knows_only_codes_with_a_page():
    asked = ("", "GS999", "messages", "GS111.md", "../en/GS111")
    assert {one: resolve(one) for one in asked} == dict.fromkeys(asked)


def test_page_of_an_unknown_code():
    with pytest.raises(KeyError, match="GS999"):
        page("GS999", "en")
