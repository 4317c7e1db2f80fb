"""``pytest --gradsan[=watch|deep|heal]``: every test watched; a silent conflict fails the test though nothing raised.

pytest imports this module in every run, so it imports neither gradsan nor torch before the option,
the ini value or a marker requests it. For the same reason the words of ``pytest --help`` are here and not in ``text``.

Under pytest-xdist the tests of a worker are watched there; the findings are passed on in the sections and properties
of the test reports.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradsan.model import Diagnosis

_MODES = ("watch", "deep", "heal")
_WATCHED = pytest.StashKey[Any]()
_SUPPRESSIONS = pytest.StashKey[Any]()
_PROPERTY = "gradsan"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--gradsan`` and the ini values ``gradsan`` and ``gradsan_language``."""
    group = parser.getgroup("gradsan", "gradsan, the gradient sanitizer for PyTorch")
    group.addoption(
        "--gradsan",
        nargs="?",
        const="watch",
        choices=(*_MODES, "off"),
        default=None,
        help="watch every test: a value that backward needed and that was overwritten fails the test, "
        "also where PyTorch says nothing (modes: watch, deep, heal; off overrides the ini file)",
    )
    parser.addini("gradsan", "how tests are watched without --gradsan: watch, deep, heal, or off", default="off")
    parser.addini("gradsan_language", "language of gradsan's reports: en, zh or auto", default="auto")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and check the ini values.

    Raises:
        pytest.UsageError: for an unknown ini value.
    """
    config.addinivalue_line(
        "markers", 'gradsan(mode="watch"): watch this test with gradsan; mode="off" leaves it alone'
    )
    for name, known in (("gradsan", (*_MODES, "off")), ("gradsan_language", ("en", "zh", "auto"))):
        value = config.getini(name)
        if value not in known:
            raise pytest.UsageError(f"{name} = {value}: it takes {', '.join(known)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch the test itself; its fixtures run unwatched."""
    mode = _mode(item)
    if mode == "off":
        return (yield)
    import gradsan

    # An older gradsan without the mode raises its own error.
    watching = gradsan.watch(mode, language=item.config.getini("gradsan_language"))  # type: ignore[arg-type]
    item.stash[_WATCHED] = watching
    with watching:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the findings to the test's report; findings that PyTorch did not raise fail a test that passed.

    A conflict that did raise is up to the test: it may have expected the error.
    """
    report = yield
    watching = item.stash.get(_WATCHED, None)
    if report.when != "call" or watching is None:
        return report
    del item.stash[_WATCHED]
    wanted, text = _described(watching, item.config)
    found = [one for one in wanted if one.severity in ("error", "warning")]
    if not found:
        return report
    report.sections.append(("gradsan", text))
    report.user_properties.extend((_PROPERTY, _summary(one, item.config.rootpath)) for one in found)
    if report.passed and any(one.silent for one in found):
        report.outcome = "failed"
        report.longrepr = text
        report.sections.pop()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the findings, each with its test."""
    rows = [
        f"{report.nodeid}: {value}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == _PROPERTY
    ]
    if rows:
        terminalreporter.section("gradsan")
        for row in rows:
            terminalreporter.write_line(row)


def _mode(item: pytest.Item) -> str:
    """Return the mode of a test: its nearest marker's, else the option's, else the ini file's."""
    marker = item.get_closest_marker("gradsan")
    if marker is not None:
        mode = marker.args[0] if marker.args else marker.kwargs.get("mode", "watch")
        if mode not in (*_MODES, "off"):
            pytest.fail(f"@pytest.mark.gradsan({mode!r}): it takes {', '.join((*_MODES, 'off'))}", pytrace=False)
        return str(mode)
    return str(item.config.getoption("--gradsan") or item.config.getini("gradsan"))


def _described(watching: Any, config: pytest.Config) -> tuple[tuple[Diagnosis, ...], str]:
    """Return the unsuppressed findings, and their report; if it cannot be made, a sentence about that.

    Suppressions are read as by ``gradsan run``: from comments, ``[tool.gradsan]`` and the files it names.
    """
    from gradsan.present import render_terminal
    from gradsan.text import choose_language

    found = watching.diagnoses
    try:
        suppressions = _suppressions(config)
        wanted = tuple(one for one in found if suppressions.wants(one))
        language = choose_language(config.getini("gradsan_language"), os.environ)
        report = replace(watching.report, diagnoses=wanted)
        return wanted, render_terminal(report, language=language, color=False, width=100, stacks=False)
    except Exception as failure:
        # The other tests must go on.
        return found, f"gradsan could not make its report: {type(failure).__name__}: {failure}"


def _suppressions(config: pytest.Config) -> Any:
    if _SUPPRESSIONS not in config.stash:
        from gradsan.launch.outcome import Suppressions
        from gradsan.options import read_options

        config.stash[_SUPPRESSIONS] = Suppressions(read_options({}, os.environ, config.rootpath), config.rootpath)
    return config.stash[_SUPPRESSIONS]


def _summary(diagnosis: Diagnosis, root: Path) -> str:
    where = [label.frame for label in diagnosis.labels if label.role == "written"]
    if not where:
        return f"{diagnosis.code} {diagnosis.cause}"
    file = Path(where[0].file)
    place = f" ({file.relative_to(root) if file.is_relative_to(root) else file}:{where[0].line})"
    return f"{diagnosis.code} {diagnosis.cause}{place}"
