"""Options of ``gradsan run`` and their three sources: command line, environment, pyproject.toml.

A *layer* holds the options of one source: checked values by field name of :class:`Options`. Later layers win.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from gradsan._editors import checked_editor
from gradsan.model import Message
from gradsan.suppress import parse_rule, rules_of

_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"
_ENVIRONMENT_NAME = "GRADSAN_OPTIONS"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(?:i?[bB])?)?", re.ASCII)
_SETTING = re.compile(r"""([^=:]+)=("[^"]*"|'[^']*'|[^:]*)(?::|$)""")

REPORT_FILES = ("json", "html", "sarif")
"""The fields of Options that name a report file, each called like its format."""

STANDARD_OUTPUT = "-"
"""Value of such a field that sends the report to the standard output."""

INPUT_FILES = ("suppressions", "baseline", "write_baseline")
"""The fields of Options that name a file about suppressed findings."""

Layer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of ``gradsan run``.

    ``json``, ``html`` and ``sarif`` are the files that receive the report in that format, or None; ``github`` requests
    annotations of GitHub Actions on the standard output, ``json_summary`` one line of JSON there; ``exit_code`` (0 to
    255) is the exit status instead of 0 if the program finished but a conflict was found, 0 leaving the program's
    status alone; ``stacks`` requests whole stacks, ``quiet`` no report on the terminal; ``editor`` is the editor for
    the line links of the HTML page, as in :func:`gradsan._editors.address_in`. ``deep`` keeps originals, ``heal`` lets
    backward use them, for all conflicts or for those that the rules ``heal_only`` match, as long as they need at most
    ``max_bytes`` bytes.

    ``nonfinite`` searches for the origin of NaN and Inf. ``halt``, ``early`` and ``strict`` as in
    :class:`gradsan.watch`. ``autopsy`` watches nothing and explains the error that ends the run; it overrides the
    others.

    ``ignore`` are rules for suppressed findings, ``suppressions`` a file of such rules, ``baseline`` a file of known
    findings, ``write_baseline`` the file that this run's findings are written to.
    """

    json: str | None = None
    html: str | None = None
    sarif: str | None = None
    github: bool = False
    json_summary: bool = False
    deep: bool = False
    heal: bool = False
    nonfinite: bool = False
    autopsy: bool = False
    heal_only: tuple[str, ...] = ()
    max_bytes: int | None = None
    halt: bool = False
    early: bool = False
    strict: bool = False
    lang: Literal["en", "zh", "auto"] = "auto"
    color: Literal["auto", "always", "never"] = "auto"
    stacks: bool = False
    quiet: bool = False
    editor: str = "auto"
    exit_code: int = 66
    ignore: tuple[str, ...] = ()
    suppressions: str | None = None
    baseline: str | None = None
    write_baseline: str | None = None


class OptionsError(Exception):
    """An option is unknown, or its value invalid."""

    def __init__(self, message: Message) -> None:
        """Keep ``message``, the sentence that explains the error."""
        super().__init__(message.key)
        self.message = message


def checked_layer(raw: Mapping[str, Any], where: Message) -> dict[str, Any]:
    """Return the layer for ``raw``: option names as users write them (``exit-code``) with raw values.

    ``where`` names the source in the sentence of an error.

    Raises:
        OptionsError: for an unknown option, or an invalid value.
    """
    layer: dict[str, Any] = {}
    for name, value in raw.items():
        field = name.strip().replace("-", "_")
        if field not in _CHECKS:
            known = ", ".join(sorted(spelled(field) for field in _CHECKS))
            raise OptionsError(Message("cli.unknown_setting", {"where": where, "name": name, "known": known}))
        check, _ = _CHECKS[field]
        try:
            layer[field] = check(value)
        except ValueError:
            said = {"where": where, "name": spelled(field), "value": value, "expected": expected(field)}
            raise OptionsError(Message("cli.bad_value", said)) from None
    return layer


def environment_layer(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the layer of ``GRADSAN_OPTIONS`` in ``environ``: ``key=value:key=value``.

    A value with a colon is quoted: ``json="a:b.json"``.

    Raises:
        OptionsError: for a part that is no ``key=value``, and as :func:`checked_layer`.
    """
    text = environ.get(_ENVIRONMENT_NAME, "")
    where = Message("cli.where_environment", {"name": _ENVIRONMENT_NAME})
    raw: dict[str, str] = {}
    position = 0
    while position < len(text):
        if text[position] in ": ":
            position += 1
            continue
        setting = _SETTING.match(text, position)
        if setting is None:
            part = text[position:].partition(":")[0]
            raise OptionsError(Message("cli.no_setting", {"where": where, "part": part}))
        name, value = setting.groups()
        raw[name.strip()] = value[1:-1] if value[:1] in {'"', "'"} and value[-1:] == value[:1] else value.strip()
        position = setting.end()
    return checked_layer(raw, where)


def file_layer(directory: Path) -> dict[str, Any]:
    """Return the layer of ``[tool.gradsan]`` in the nearest pyproject.toml with this table, from ``directory`` upwards.

    Relative paths are relative to the folder of that file.

    Raises:
        OptionsError: if a pyproject.toml on the way cannot be read, and as :func:`checked_layer`.
    """
    for folder in (directory, *directory.parents):
        file = folder / "pyproject.toml"
        table = _gradsan_table(file)
        if table is not None:
            layer = checked_layer(table, Message("cli.where_file", {"path": file}))
            for name in (*REPORT_FILES, *INPUT_FILES):
                if layer.get(name) not in (None, STANDARD_OUTPUT):
                    layer[name] = str(folder / layer[name])
            return layer
    return {}


def merged(*layers: Layer) -> Options:
    """Return the options of ``layers``, the weakest layer first; options set in none keep their defaults."""
    values: dict[str, Any] = {}
    for layer in layers:
        values.update(layer)
    return Options(**values)


def working_directory() -> Path | None:
    """Return the process's working directory; None if that has been deleted."""
    try:
        return Path.cwd()
    except OSError:
        return None


def read_options(command_line: Mapping[str, Any], environ: Mapping[str, str], directory: Path | None) -> Options:
    """Return the options of all three sources; ``directory`` is the working directory, None if it no longer exists.

    Raises:
        OptionsError: as :func:`checked_layer`, :func:`environment_layer` and :func:`file_layer`.
    """
    return merged(
        {} if directory is None else file_layer(directory),
        environment_layer(environ),
        checked_layer(command_line, Message("cli.where_command_line")),
    )


def spelled(field: str) -> str:
    """Return the name of a field of :class:`Options` as users write it."""
    return field.replace("_", "-")


def expected(field: str) -> Message:
    """Return the sentence on valid values of a field of :class:`Options`. Raises KeyError for an unknown name."""
    return Message(f"cli.takes_{_CHECKS[field][1]}")


def _gradsan_table(file: Path) -> Mapping[str, Any] | None:
    try:
        if not file.is_file():
            return None
        with file.open("rb") as stream:
            tool = import_module(_TOML).load(stream).get("tool", {})
    except (OSError, ValueError) as failure:
        # A TOMLDecodeError is a ValueError, and so is a UnicodeDecodeError.
        raise OptionsError(
            Message("cli.broken_file", {"path": file, "reason": getattr(failure, "strerror", None) or str(failure)})
        ) from None
    table = tool.get("gradsan") if isinstance(tool, Mapping) else None
    if table is None or isinstance(table, Mapping):
        return table
    said = {
        "where": Message("cli.where_file", {"path": file}),
        "name": "gradsan",
        "value": table,
        "expected": Message("cli.takes_table"),
    }
    raise OptionsError(Message("cli.bad_value", said))


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(value)
    return value


def _rules(value: Any) -> tuple[str, ...]:
    rules = tuple(word.strip() for word in _words(value) if word.strip())
    for rule in rules:
        parse_rule(rule)
    return rules


def _words(value: Any) -> Sequence[str]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
        raise ValueError(value)
    return words


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else None
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(value)


def _scope(value: Any) -> tuple[str, ...]:
    return tuple(str(rule) for rule in rules_of(_words(value)))


def _bytes(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        said = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if said is None:
            raise ValueError(value)
        number = int(float(said[1]) * 1024 ** " KMGT".index((said[2] or " ").upper()))
    if number <= 0:
        raise ValueError(value)
    return number


def _status(value: Any) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.isascii() and value.isdigit()):
        status = int(value)
        if 0 <= status <= 255:
            return status
    raise ValueError(value)


def _one_of(*words: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError(value)
        return value

    return check


_CHECKS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "json": (_path, "path"),
    "html": (_path, "path"),
    "sarif": (_path, "path"),
    "lang": (_one_of("en", "zh", "auto"), "lang"),
    "color": (_one_of("auto", "always", "never"), "color"),
    "editor": (checked_editor, "editor"),
    "exit_code": (_status, "status"),
    "ignore": (_rules, "rules"),
    "suppressions": (_path, "path"),
    "baseline": (_path, "path"),
    "write_baseline": (_path, "path"),
    "heal_only": (_scope, "scope"),
    "max_bytes": (_bytes, "bytes"),
    "stacks": (_switch, "switch"),
    "quiet": (_switch, "switch"),
    "github": (_switch, "switch"),
    "json_summary": (_switch, "switch"),
    "deep": (_switch, "switch"),
    "heal": (_switch, "switch"),
    "nonfinite": (_switch, "switch"),
    "halt": (_switch, "switch"),
    "early": (_switch, "switch"),
    "strict": (_switch, "switch"),
    "autopsy": (_switch, "switch"),
}
"""The check of each field of Options, in the order of ``--help``, and the text key for its valid values."""

SWITCHES = tuple(spelled(field) for field, (_, kind) in _CHECKS.items() if kind == "switch")
WITH_VALUE = tuple(spelled(field) for field, (_, kind) in _CHECKS.items() if kind != "switch")
"""The names of the options, as users write them."""

assert set(_CHECKS) == {field.name for field in fields(Options)}
