"""The JSON report, from its schema."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from gradsan.text import Language
from reference.markdown import code, join, table
from reference.words import translated, word

FILE = "report.schema.json"
_REFERENCE = "#/$defs/"


def source() -> str:
    """The schema as it ships."""
    return (files("gradsan.present") / FILE).read_text(encoding="utf-8")


def pages(language: Language) -> dict[str, str]:
    """``json.md``."""
    schema = json.loads(source())
    objects = {name: part for name, part in schema["$defs"].items() if "properties" in part}
    parts = [f"# {word('json_title', language)}", word("json_intro", language), f"## {word('json_report', language)}"]
    parts += _object("", schema, schema["$defs"], language)
    for name, part in objects.items():
        parts += [f"## {name}", *_object(name, part, schema["$defs"], language)]
    return {"json.md": join(*parts)}


def _object(title: str, part: dict[str, Any], named: dict[str, Any], language: Language) -> list[str]:
    head = [word(key, language) for key in ("field", "type", "meaning")]
    rows = [
        (code(name), _type(value, named), translated(_description(value, named), language))
        for name, value in part["properties"].items()
    ]
    return [translated(part.get("description", ""), language), table(head, rows), *_inner(title, part, named, language)]


def _inner(title: str, part: dict[str, Any], named: dict[str, Any], language: Language) -> list[str]:
    """Objects that a field describes at its place, each with its table."""
    found: list[str] = []
    for name, value in part["properties"].items():
        inner = value.get("items", value) if isinstance(value.get("items", {}), dict) else value
        if "properties" in inner:
            path = f"{title}.{name}"
            found += [f"### {path}", *_object(path, {**inner, "description": ""}, named, language)]
    return found


def _description(value: dict[str, Any], named: dict[str, Any]) -> str:
    text = value.get("description", "")
    if not text and "$ref" in value and "properties" not in _target(value, named):
        text = _target(value, named).get("description", "")
    return str(text)


def _target(value: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = named[value["$ref"].removeprefix(_REFERENCE)]
    return found


def _type(value: dict[str, Any], named: dict[str, Any]) -> str:
    """A type as people write it: with a link where it has a table of its own."""
    if "$ref" in value:
        name, target = value["$ref"].removeprefix(_REFERENCE), _target(value, named)
        if "properties" not in target:
            return _type(target, named)
        null = " | null" if "null" in target.get("type", []) else ""
        return f"[{name}](#{name}){null}"
    if "const" in value:
        return code(json.dumps(value["const"]))
    if "enum" in value:
        return " | ".join(code(json.dumps(choice)) for choice in value["enum"])
    kinds = value["type"] if isinstance(value["type"], list) else [value["type"]]
    return " | ".join(f"[{_type(value['items'], named)}, …]" if kind == "array" else str(kind) for kind in kinds)
