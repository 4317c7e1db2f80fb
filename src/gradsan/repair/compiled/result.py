"""Result of comparing a compiled program with eager code, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradsan.model import Diagnosis, Message
from gradsan.repair.compiled.judging import Difference
from gradsan.repair.trials.compiling import Fragment, Function

Verdict = Literal["same", "differs", "undecided", "nothing_compiled", "not_run"]

_SHOWN_IN_JSON = 100


@dataclass(frozen=True, slots=True)
class Compared:
    """How compiled code stands to eager code.

    ``doubts`` are what a reader must know besides: random numbers, autocast, rounding that grows. ``reasons`` say why
    nothing was compared, or what one of both did and the other did not. ``stage`` is where the difference arises:
    ``fragment`` in a graph, ``write`` by a write that the graph does not notice, ``tracing`` before a backend is asked,
    ``left_out`` in one function, ``together`` only in the whole program. ``findings`` are those of the compiled run
    that eager code has not, or the other way round. ``output`` is what the program said, where it did not come to run.
    """

    verdict: Verdict
    functions: tuple[Function, ...] = ()
    titles: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    graphs: int = 0
    rounds: int = 0
    losses: int = 0
    gradients: int = 0
    parameters: int = 0
    largest: float = 0.0
    allowed: float = 0.0
    dtype: str = "float32"
    differences: tuple[Difference, ...] = ()
    stage: str = ""
    fragment: Fragment | None = None
    function: Function | None = None
    findings: tuple[Diagnosis, ...] = ()
    doubts: tuple[Message, ...] = ()
    reasons: tuple[Message, ...] = ()
    output: str = ""

    def as_json(self, say: Any) -> dict[str, Any]:
        """For ``json.dumps``: numbers that are not finite as None, sentences by ``say``."""
        fragment = None
        if self.fragment is not None:
            fragment = {key: one for key, one in asdict(self.fragment).items() if key not in ("program", "inputs")}
        told = {
            "verdict": self.verdict,
            "compiled": [{"file": file, "function": name} for file, name in self.functions],
            "backends": self.backends,
            "graphs": self.graphs,
            "compared": {
                "rounds": self.rounds,
                "losses": self.losses,
                "gradients": self.gradients,
                "parameters": self.parameters,
            },
            "largest": self.largest,
            "allowed": self.allowed,
            "dtype": self.dtype,
            "differences": [asdict(one) for one in self.differences[:_SHOWN_IN_JSON]],
            "stage": self.stage or None,
            "fragment": fragment,
            "function": None if self.function is None else {"file": self.function[0], "function": self.function[1]},
            "findings": [{"code": one.code, "cause": one.cause, "title": say(one.title)} for one in self.findings],
            "doubts": [say(one) for one in self.doubts],
            "reasons": [say(one) for one in self.reasons],
        }
        return {key: _finite(value) for key, value in told.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
