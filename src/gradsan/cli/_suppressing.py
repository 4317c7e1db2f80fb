"""A report without the findings that the user does not want, and what there is to say about that."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

from gradsan.model import Diagnosis, Message, Report
from gradsan.options import Options, OptionsError
from gradsan.suppress import Rule, RuleError, parse_rule, read_baseline, read_rules, suppress, write_baseline


class Suppressions:
    """The rules and the baseline of a run, read before the program starts."""

    def __init__(self, options: Options, directory: Path | None) -> None:
        """Read what ``options`` name; relative paths count from ``directory``.

        Raises:
            OptionsError: for a file that cannot be read or understood.
        """
        self._written = None if options.write_baseline is None else _path(options.write_baseline, directory)
        self._rules: tuple[Rule, ...] = tuple(parse_rule(rule, "ignore") for rule in options.ignore)
        self._baseline: dict[str, str] = {}
        try:
            if options.suppressions is not None:
                self._rules += read_rules(_path(options.suppressions, directory))
            if options.baseline is not None:
                self._baseline = read_baseline(_path(options.baseline, directory))
        except RuleError as failure:
            raise OptionsError(Message("suppress.no_rule", {"where": failure.where, "text": failure.text})) from None
        except OSError as failure:
            said = {"path": failure.filename, "reason": failure.strerror or str(failure)}
            raise OptionsError(Message("suppress.unreadable", said)) from None
        except (ValueError, KeyError, TypeError):
            path = options.baseline if options.baseline is not None else options.suppressions
            raise OptionsError(Message("suppress.not_understood", {"path": path})) from None

    def wants(self, diagnosis: Diagnosis) -> bool:
        """Whether neither a comment nor a rule nor the baseline has a finding."""
        return bool(suppress((diagnosis,), self._rules, self._baseline).kept)

    def applied(self, report: Report) -> tuple[Report, list[Message]]:
        """The report that is left, and sentences about what was taken away, and about rules that nothing met."""
        said: list[Message] = []
        if self._written is not None:
            try:
                write_baseline(self._written, report.diagnoses)
            except OSError as failure:
                values = {"path": self._written, "reason": failure.strerror or str(failure)}
                said.append(Message("suppress.unwritable", values))
            else:
                values = {"path": self._written, "count": len(report.diagnoses)}
                said.append(Message("suppress.baseline_written", values))
        done = suppress(report.diagnoses, self._rules, self._baseline, _program_files())
        for rule, count in done.hits.items():
            said.append(Message("suppress.hit", {"rule": str(rule), "origin": rule.origin, "count": count}))
        said.extend(Message("suppress.unused", {"rule": str(rule), "origin": rule.origin}) for rule in done.unused)
        if done.known:
            said.append(Message("suppress.known", {"count": done.known}))
        if done.gone:
            said.append(Message("suppress.gone", {"count": done.gone}))
        return replace(report, diagnoses=done.kept), said


def _path(name: str, directory: Path | None) -> Path:
    return Path(name) if directory is None else directory / name


def _program_files() -> list[str]:
    """The sources of the modules that are the user's own."""
    roots = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    own = str(Path(__file__).parent.parent)
    return [file for file in files if file and file.endswith(".py") and not file.startswith((*roots, own))]
