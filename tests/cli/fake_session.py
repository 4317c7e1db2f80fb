"""``gradsan`` with a session that finds, or fails at, what the first word says: ``fake_session.py SESSION run …``."""

import sys

from gradsan import cli
from gradsan.cli import run
from gradsan.model import Diagnosis, Frame, Label, Message, Program, Report, Seen, Site


class FakeSession:
    def __init__(self, behaviour):
        self.behaviour = behaviour

    def start(self):
        self._fail("start")

    def stop(self):
        self._fail("stop")

    def report(self, program: Program) -> Report:
        self._fail("report")
        found = (self._diagnosis(program),) if self.behaviour in ("error", "warning", "note") else ()
        unseen = (Message("THE BLIND SPOT"),) if self.behaviour == "blind" else ()
        return Report(
            program=program,
            seen=Seen(saves=7, blind_spots=unseen),
            diagnoses=found,
            gradsan="0",
            torch="0",
            python="3",
        )

    def _diagnosis(self, program):
        frame = Frame(program.argv[0] if program.argv[0] != "-c" else "<string>", 1, "f", is_user=True)
        return Diagnosis(
            code="GS101",
            cause="result_overwritten",
            severity=self.behaviour,
            silent=False,
            title=Message("THE TITLE"),
            explanation=Message("THE EXPLANATION"),
            labels=(Label("used", frame, Message("THE LABEL"), site=Site((frame,))),),
        )

    def _fail(self, what):
        if self.behaviour == f"{what} fails":
            raise LookupError(f"broken {what}\nsecond line")


behaviour = sys.argv[1]
run._open_session = lambda options, directory: FakeSession(behaviour)
sys.exit(cli.main(sys.argv[2:]))
