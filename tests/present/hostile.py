"""A report whose every text tries to break out of where it stands."""

import linecache

from gradsan.model import (
    Diagnosis,
    Event,
    Fix,
    Frame,
    Gradient,
    Label,
    NamedTensor,
    PathNode,
    Program,
    Report,
    Seen,
    Site,
    Verification,
    Why,
)
from gradsan.present.json import plain

BREAKOUT = "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
MIXED = f"\"'`&amp;<b>{BREAKOUT} 🙂 \u202e\u2066evil\u2069 $title ${{style}} {{0}} %s \x1b[31m \u2028"
FILE = f"<hostile {BREAKOUT}>"
EVENTS = 10_000


def hostile(events=()):
    linecache.cache[FILE] = (1, None, [f"x = '{MIXED}'\n", "y = x\n", f"# {BREAKOUT}\n"], FILE)
    frame = Frame(FILE, 1, MIXED, 1, 1, 8, is_user=True)
    said = plain(MIXED)
    labels = tuple(
        Label(role, frame, said, MIXED, Site((frame, frame))) for role in ("saved", "written", "used", "bridge")
    )
    return Report(
        program=Program((MIXED, "--x", MIXED), "failed", (MIXED, MIXED)),
        seen=Seen(1, 2, 3, 4, blind_spots=(said,)),
        diagnoses=(
            Diagnosis(
                code="GS101",
                cause="result_overwritten",
                severity="error",
                silent=True,
                title=said,
                explanation=said,
                labels=labels,
                tensor=NamedTensor(MIXED, (3,), MIXED, MIXED, MIXED, MIXED),
                why=Why(MIXED, said),
                gradient=Gradient("wrong", 0.5),
                fixes=(
                    Fix(
                        "k",
                        "changed",
                        said,
                        how_changed=said,
                        diff=f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-{MIXED}\n+y\n",
                        verification=Verification("failed", MIXED, 1.0, 2.0, 3.0),
                    ),
                ),
                notes=(said,),
                count=7,
                events=tuple(events) or (Event("saved", 1, 0, MIXED, 0, frame), Event("used", 2, 0, MIXED, 1, frame)),
                way=(PathNode("loss", None, 1), PathNode("bridge", MIXED), PathNode("saved", MIXED, 0)),
                sources=(MIXED, "b.json"),
            ),
        ),
        gradsan=MIXED,
        torch=MIXED,
        python=MIXED,
    )


def many_events(count=EVENTS):
    """A save, then writes and steps over a long clock, and in the end the use."""
    frame = Frame("train.py", 7, "f", is_user=True)
    between = (
        Event(
            "step" if number % 10 == 0 else "written",
            10 + 3 * number,
            number // 10,
            "mul_",
            number + 1,
            frame,
            number % 3 > 0,
        )
        for number in range(count - 3)
    )
    end = 10 + 3 * count
    return (
        Event("saved", 1, 0, "ExpBackward0", 0, frame),
        *between,
        Event("backward", end, 9, "backward", None, frame),
        Event("used", end, 9, "ExpBackward0", count - 3, frame),
    )
