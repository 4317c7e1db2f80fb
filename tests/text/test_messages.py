import ast
import re
import string
from pathlib import Path

import pytest

import gradsan.text
from cases import each
from gradsan.model import Message
from gradsan.text import choose_language, say
from gradsan.text._messages import sentences

PACKAGE = Path(gradsan.text.__file__).parents[1]
TABLES = ("title", "explanation", "label", "help", "why", "note", "blind", "ui", "cli", "explain")
EVERY_KEY = sorted(set(sentences("en")) | set(sentences("zh")))


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setenv("GRADSAN_TEXT", "strict")


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("GRADSAN_TEXT", raising=False)


@pytest.fixture
def catalogue(monkeypatch):
    known = {
        "en": {
            "greeting": "hello {name}",
            "only.english": "plain",
            "rows.one": "one row",
            "rows.other": "{count:,} rows",
            "ratio": "{value:.2f}",
        },
        "zh": {"greeting": "你好 {name}", "rows.one": "{count} 行", "rows.other": "{count} 行", "name": "世界"},
    }
    monkeypatch.setattr("gradsan.text._messages.sentences", lambda language: known.get(language, {}))


def fields(template):
    """What a template asks for: each field as often as it occurs is not required, word order differs."""
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def test_both_languages_have_the_same_keys():
    assert set(sentences("en")) == set(sentences("zh"))


@each("key", EVERY_KEY)
def test_both_languages_fill_the_same_fields(key):
    english, chinese = sentences("en")[key], sentences("zh")[key]
    counted = key.endswith((".one", ".other"))
    assert fields(english) | ({"count"} if counted else set()) == fields(chinese) | ({"count"} if counted else set())
    assert all(name.isidentifier() for name in fields(english)), "a field is a plain name"


@each("key", EVERY_KEY)
def test_every_sentence_says_something(key):
    for language in ("en", "zh"):
        text = sentences(language)[key]
        assert text
        assert not re.search(r"/work\b|/tmp\b|/home/|/root\b", text)


@each("key", [key for key in EVERY_KEY if key.endswith((".one", ".other"))])
def test_counted_sentences_come_in_pairs(key):
    stem = key.rpartition(".")[0]
    assert {f"{stem}.one", f"{stem}.other"} <= set(EVERY_KEY)


@each("language", ["en", "zh"])
def test_the_tables_are_the_documented_ones(language):
    toml = (PACKAGE / "text" / language / "messages.toml").read_text(encoding="utf-8")
    assert tuple(re.findall(r"^\[(\w+)\]$", toml, re.MULTILINE)) == TABLES
    assert tuple(re.findall(r"^#   \[(\w+)\]", toml, re.MULTILINE)) == TABLES


def test_a_title_stands_alone():
    for key in (key for key in EVERY_KEY if key.startswith("title.")):
        english = sentences("en")[key]
        assert not english.endswith("."), key
        assert not sentences("zh")[key].endswith("。"), key
        first = english.split()[0]
        assert first[0] == first[0].lower() or first.isupper(), f"{key} starts lower-case: {english}"


def keys_in_code():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Message"):
                continue
            first = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "key"), None)
            where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            if isinstance(first, ast.Constant):
                yield where, re.escape(first.value)
            elif isinstance(first, ast.JoinedStr):
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in first.values]
                yield where, "".join(parts)


def test_every_key_used_in_code_is_written():
    forms = {key.removesuffix(".one").removesuffix(".other") for key in EVERY_KEY} | {*EVERY_KEY}
    used = list(keys_in_code())
    assert used
    assert [one for one in used if not any(map(re.compile(one[1]).fullmatch, forms))] == []


def test_fields_are_filled(strict, catalogue):
    assert say(Message("greeting", {"name": "world"}), "en") == "hello world"
    assert say(Message("ratio", {"value": 1.239}), "en") == "1.24"


def test_braces_in_values_are_left_alone(strict, catalogue):
    assert say(Message("greeting", {"name": "{x} %s \\"}), "en") == "hello {x} %s \\"


def test_a_value_that_is_a_message_is_said_first_in_the_same_language(strict, catalogue):
    assert say(Message("greeting", {"name": Message("name")}), "zh") == "你好世界"


@each(("count", "said"), [(1, "one row"), (0, "0 rows"), (1234, "1,234 rows")])
def test_count_chooses_the_wording(strict, catalogue, count, said):
    assert say(Message("rows", {"count": count}), "en") == said


def test_missing_messages_are_errors_in_tests(strict, catalogue):
    with pytest.raises(KeyError, match=r"no message 'nothing\.here' in text/en"):
        say(Message("nothing.here"), "en")
    with pytest.raises(KeyError, match=r"no message 'only\.english' in text/zh"):
        say(Message("only.english"), "zh")
    with pytest.raises(KeyError, match=r"'greeting' has a field \{name\}"):
        say(Message("greeting"), "en")
    with pytest.raises(TypeError):
        say(Message("ratio", {"value": None}), "en")


def test_a_user_gets_english_or_the_key_instead(lenient, catalogue):
    assert say(Message("only.english"), "zh") == "plain"
    assert say(Message("only.english"), "fr") == "plain"
    assert say(Message("nothing.here"), "zh") == "nothing.here"
    assert say(Message("greeting"), "en") == "hello {name}"
    assert say(Message("ratio"), "en") == "{value}"
    assert say(Message("ratio", {"value": None}), "en") == "None"
    assert say(Message("rows"), "en") == "rows"


@each(
    ("option", "environ", "language"),
    [
        ("en", {"LANG": "zh_CN.UTF-8"}, "en"),
        ("zh", {}, "zh"),
        ("auto", {}, "en"),
        ("auto", {"LANG": "zh_CN.UTF-8"}, "zh"),
        ("auto", {"LANG": "ZH_tw"}, "zh"),
        ("auto", {"LANG": "C.UTF-8"}, "en"),
        ("auto", {"LC_MESSAGES": "zh_CN", "LANG": "en_US"}, "zh"),
        ("auto", {"LC_ALL": "en_US", "LC_MESSAGES": "zh_CN", "LANG": "zh_CN"}, "en"),
        ("auto", {"LC_ALL": "", "LANG": "zh_CN"}, "zh"),
    ],
)
def test_choose_language(option, environ, language):
    assert choose_language(option, environ) == language
