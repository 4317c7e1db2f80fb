"""Wordings of errors by release of PyTorch: the catalogue's patterns, searched for in the files of torch wheels.

    python tools/wordings.py torch-2.6.0-….whl torch-2.7.1-….whl > tests/catalogue/wordings.json
    python tools/wordings.py --add site-packages > tests/catalogue/wordings.json

A wheel of any platform serves; nothing of it is run. Of each pattern the longest piece that is plain text is looked
for, in the string literals of Python files and in the text of libraries; where it is not there as a whole, because the
program puts it together, at least half of its sequences of four words. A wording that is there can be said by that
version; under which circumstances, only a program shows (``tests/catalogue`` runs those for the installed one).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gradsan.catalogue import rows

if sys.version_info >= (3, 11):
    from re import _constants as sre
    from re import _parser as parser
else:
    import sre_constants as sre
    import sre_parse as parser

TABLE = Path(__file__).parent.parent / "tests" / "catalogue" / "wordings.json"
_LIBRARIES = ("libtorch_cpu.", "libtorch_python.", "libc10.", "torch_cpu.", "torch_python.", "c10.")
_SPEAKING = re.compile(
    r"torch/(\w+\.py|(autograd|nn|optim|utils|_functorch|_dynamo|_library|_subclasses|distributed/fsdp)/.*\.py"
    r"|_inductor/cudagraph_trees\.py|testing/.*optests.*\.py)"
)
_TEXT = re.compile(rb"[\t\n\x20-\x7e]{8,}")
_WORDS = 4


def pieces() -> dict[str, str]:
    """The plain piece of every pattern, by ``row/number``."""
    return {f"{row.slug}/{at}": plain_piece(one.pattern) for row in rows() for at, one in enumerate(row.patterns)}


def plain_piece(pattern: str) -> str:
    """The longest run of characters that stand for themselves, outside of groups."""
    found, run = [""], ""
    for kind, value in parser.parse(pattern):
        if kind is sre.LITERAL:
            run += chr(value)
        else:
            found.append(run)
            run = ""
    return max((*found, run), key=len)


def found_in(files: Iterable[tuple[str, Callable[[], bytes]]], wanted: dict[str, str]) -> set[str]:
    """Which of the pieces are in the files, given as name and what reads it."""
    texts = []
    for name, read in files:
        if _SPEAKING.fullmatch(name):
            texts += _strings(read())
        elif name.rpartition("/")[2].startswith(_LIBRARIES):
            texts += [one.decode() for one in _TEXT.findall(read())]
    said = "\0".join(texts)
    return {key for key, piece in wanted.items() if piece in said or _is_mostly_in(said, piece)}


def _is_mostly_in(said: str, piece: str) -> bool:
    words = piece.split()
    parts = [" ".join(words[at : at + _WORDS]) for at in range(len(words) - _WORDS + 1)]
    return bool(parts) and 2 * sum(part in said for part in parts) >= len(parts)


def wheel_files(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The files of torch in a wheel, or in a folder that holds an installed one."""
    if path.is_dir():
        for file in path.glob("torch/**/*"):
            if file.is_file():
                yield file.relative_to(path).as_posix(), file.read_bytes
        return
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.startswith("torch/"):
                yield name, lambda name=name: wheel.read(name)


def _strings(source: bytes) -> Iterator[str]:
    """The string literals of Python source; an f-string is one, with a gap for each value."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "\0" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            yield node.value.decode(errors="replace")


def main() -> None:
    """Print the table for the wheels that are named."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("wheels", nargs="+", type=Path)
    options.add_argument("--add", action="store_true", help="keep the versions that the table has already")
    asked = options.parse_args()
    known: dict[str, list[str]] = json.loads(TABLE.read_text(encoding="utf-8")) if asked.add else {}
    wanted = pieces()
    table = {key: set(known.get(key, ())) for key in wanted}
    for path in asked.wheels:
        version = _version(path)
        for key in found_in(wheel_files(path), wanted):
            table[key].add(version)
    in_order = {key: sorted(versions, key=_order) for key, versions in sorted(table.items())}
    lines = (f" {json.dumps(key)}: {json.dumps(versions)}" for key, versions in in_order.items())
    print("{\n" + ",\n".join(lines) + "\n}")


def _version(path: Path) -> str:
    name = next(path.glob("torch-*.dist-info")).name.removesuffix(".dist-info") if path.is_dir() else path.name
    return name.split("-")[1].partition("+")[0]


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    main()
