"""Vocabulary of gradsan as plain, frozen data.

Everything that the recorder and the detectors pass on, and everything that reaches a presenter, is made of these
classes. They hold no tensor, no frame and no torch object, so they can be written by hand in a test, sent to another
process and kept for ever. Terms are those of ``docs/architecture.md``.
"""

from gradsan.model._events import (
    Bridge,
    ByteChange,
    Clue,
    Confidence,
    Conflict,
    Copies,
    Deviation,
    Evidence,
    Failure,
    Held,
    HeldClue,
    Layer,
    LiveClue,
    Moment,
    Name,
    Passed,
    PathClue,
    Save,
    Seen,
    Use,
    Write,
    WriteKind,
)
from gradsan.model._findings import (
    Applicability,
    Diagnosis,
    Event,
    EventKind,
    Fix,
    Gradient,
    GradientStatus,
    Label,
    Lines,
    NamedTensor,
    NonFiniteFacts,
    Outcome,
    PathNode,
    PathNodeKind,
    Program,
    Report,
    ReportMode,
    Role,
    Severity,
    Verification,
    Why,
)
from gradsan.model._nonfinite import Birth, Born, NonFinite, NonFiniteSeen, NonFiniteValue, Operand
from gradsan.model._sites import Frame, Message, Region, Site, TensorInfo, package_path
