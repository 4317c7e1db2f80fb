"""Variables of frames that gradsan looks through: none is kept alive, and what the program took by locals() stays."""

import re
import sys
import threading
import weakref
from pathlib import Path

import gradsan
from gradsan import _torch
from gradsan.graph import live, naming


class Thing:
    pass


def look():
    list(naming.find(sys._getframe(1), lambda tensor: False))


def test_deleted_variables_are_freed_after_a_look():
    thing = Thing()
    alive = weakref.ref(thing)
    look()
    del thing
    assert alive() is None


def test_a_dict_taken_by_locals_stays():
    kept = 3
    taken = locals()
    look()
    assert taken["kept"] == kept


def test_rebound_variables_are_freed_after_a_look():
    thing = Thing()
    alive = weakref.ref(thing)
    live.tensor_of(sys._getframe(), "thing")
    thing = None
    assert alive() is None


def test_names_that_exec_has_made_stay():
    exec("made = 3")
    look()
    assert eval("made") == 3


def run_traced(trace):
    """What a function of two variables gives while ``trace`` is the trace function of this thread."""

    def traced():
        kept = 3
        other = kept + 1
        return kept + other

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: trace(frame) if frame.f_code is traced.__code__ else None)
    try:
        return traced()
    finally:
        sys.settrace(before)


def test_within_a_trace_function_nothing_is_unbound():
    def trace(frame, *_):
        look()
        naming.find(frame, lambda tensor: False)
        return trace

    assert run_traced(trace) == 7


def test_another_thread_unbinds_nothing_in_a_frame_that_is_traced():
    def trace(frame, *_):
        thread = threading.Thread(target=_torch.locals_of, args=(frame,))
        thread.start()
        thread.join()
        return trace

    assert run_traced(trace) == 7


def test_variables_of_frames_are_read_in_one_place():
    package = Path(gradsan.__file__).parent
    elsewhere = [
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if re.search(r"\.f_locals\b", file.read_text(encoding="utf-8")) and file.parent.name != "_torch"
    ]
    assert elsewhere == []
