"""A table of cases as one test that runs them all and lists those that failed."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(
    names: str | Sequence[str],
    cases: Iterable[Any],
    ids: Callable[[Any], object] | Sequence[str] | None = None,
    before: Callable[[], object] = lambda: None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, but one item. For checks that are cheap and leave nothing behind.

    Each case has a ``tmp_path`` and a ``monkeypatch`` of its own; other fixtures are shared by all cases of a test.
    ``before`` is called before each.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [case if len(arguments) > 1 else (case,) for case in map(plain, cases)]
    assert table, "a table without a case"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(*owner: Any, **fixtures: Any) -> None:
            failed = []
            for number, values in enumerate(table):
                try:
                    before()
                    run_one(
                        functools.partial(test, *owner),
                        dict(zip(arguments, values, strict=True)),
                        dict(fixtures),
                        number,
                    )
                except pytest.skip.Exception:
                    continue
                except (Exception, pytest.fail.Exception):
                    # The two outer frames are this module's.
                    failed.append(f"{name_of(values, number, ids)}\n{traceback.format_exc(limit=-4)}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(table)} cases failed\n\n" + "\n\n".join(failed[:10]), pytrace=False)

        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in arguments]
        run_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        del run_all.__wrapped__  # type: ignore[attr-defined]
        return run_all

    return decorate


def plain(case: Any) -> Any:
    """The values of a case that may be given as ``pytest.param``."""
    if type(case).__name__ != "ParameterSet":
        return case
    assert not case.marks, "a marked case is a test of its own"
    return case.values if len(case.values) > 1 else case.values[0]


def run_one(test: Callable[..., None], values: dict[str, Any], fixtures: dict[str, Any], number: int) -> None:
    if "tmp_path" in fixtures:
        fixtures["tmp_path"] = fixtures["tmp_path"] / f"case{number}"
        fixtures["tmp_path"].mkdir()
    if "capsys" in fixtures:
        fixtures["capsys"].readouterr()
    if "monkeypatch" in fixtures:
        with fixtures["monkeypatch"].context() as own:
            test(**{**fixtures, "monkeypatch": own}, **values)
    else:
        test(**fixtures, **values)


def name_of(values: Sequence[Any], number: int, ids: Callable[[Any], object] | Sequence[str] | None) -> str:
    if ids is None or callable(ids):
        return f"case {number}: " + ", ".join(str((ids and ids(one)) or repr(one))[:200] for one in values)
    return f"case {number}: {ids[number]}"
