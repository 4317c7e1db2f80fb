"""The Python interface, from its docstrings: the public names of ``gradsan``, and the data that a report is made of."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import gradsan
from gradsan.model import Report
from gradsan.text import Language
from reference.docstrings import as_markdown
from reference.markdown import code, fence, join, table
from reference.words import word


def pages(language: Language) -> dict[str, str]:
    """``api.md``."""
    parts = [f"# {word('api_title', language)}", word("api_intro", language)]
    for name in gradsan.__all__:
        public = getattr(gradsan, name)
        if callable(public):
            parts += _callable(f"gradsan.{name}", public, language)
    parts += [f"## {word('api_data', language)}", word("api_data_intro", language)]
    for kind in reachable(Report):
        parts += _dataclass(kind, language)
    return {"api.md": join(*parts)}


def reachable(root: type) -> Iterator[type]:
    """``root`` and every dataclass that its fields, or theirs, are made of; each once, in the order of the fields."""
    seen, waiting = {root}, [root]
    while waiting:
        kind = waiting.pop(0)
        yield kind
        for found in _named(kind):
            if found not in seen:
                seen.add(found)
                waiting.append(found)


def _named(kind: type) -> Iterator[type]:
    """The dataclasses that the types of the fields of ``kind`` name."""
    waiting: list[Any] = [*typing.get_type_hints(kind).values()]
    while waiting:
        hint = waiting.pop(0)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield hint
        waiting = [*get_args(hint), *waiting] if get_origin(hint) is not typing.Literal else waiting


def _callable(name: str, public: Any, language: Language) -> list[str]:
    own = public.__init__ if inspect.isclass(public) else public
    parts = [f"## {name}", fence(name + _signature(own, method=inspect.isclass(public)), "text")]
    parts.append(as_markdown(inspect.getdoc(public) or "", language))
    if inspect.isclass(public):
        for member, value in vars(public).items():
            if not member.startswith("_") and (isinstance(value, property) or inspect.isfunction(value)):
                own_name = f"### {name}().{member}" if isinstance(value, property) else f"### {name}().{member}()"
                parts += [own_name, as_markdown(inspect.getdoc(value) or "", language)]
    return parts


def _signature(function: Any, *, method: bool) -> str:
    """As one reads it: with the values that a name of a type stands for, and without ``self``."""
    hints = _hints(function)
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in list(signature.parameters.values())[1 if method else 0 :]
    ]
    shown = [_parameter(parameter) for parameter in parameters]
    keyword = next((at for at, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY), None)
    if keyword is not None:
        shown.insert(keyword, "*")
    back = hints.get("return", signature.return_annotation)
    return f"({', '.join(shown)})" + ("" if method or back is inspect.Signature.empty else f" -> {_type(back)}")


def _parameter(parameter: inspect.Parameter) -> str:
    kind = "" if parameter.annotation is parameter.empty else f": {_type(parameter.annotation)}"
    return f"{parameter.name}{kind}" + ("" if parameter.default is parameter.empty else f" = {parameter.default!r}")


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError:
        # A name that exists for the type checker only; it is shown as it is written.
        return {}


def _dataclass(kind: type, language: Language) -> list[str]:
    head = [word(key, language) for key in ("field", "type", "default")]
    hints = typing.get_type_hints(kind)
    rows = [
        (code(field.name), code(_type(hints[field.name])), code(_default(field)))
        for field in dataclasses.fields(kind)
        if not field.name.startswith("_")
    ]
    return [f"### {kind.__name__}", as_markdown(inspect.getdoc(kind) or "", language), table(head, rows)]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return "" if field.default_factory is dataclasses.MISSING else f"{getattr(field.default_factory, '__name__', '')}()"


def _type(hint: Any) -> str:
    if isinstance(hint, str):
        return hint
    if hint is type(None):
        return "None"
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, arguments))
    if origin is not None:
        inner = ", ".join("…" if one is ... else _list_type(one) for one in arguments)
        return f"{_name(origin)}[{inner}]"
    return _name(hint)


def _list_type(hint: Any) -> str:
    return "[" + ", ".join(map(_type, hint)) + "]" if isinstance(hint, list) else _type(hint)


def _name(hint: Any) -> str:
    return re.sub(r"^typing\.", "", getattr(hint, "__name__", "") or str(hint))
