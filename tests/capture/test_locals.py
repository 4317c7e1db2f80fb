"""Looking through a frame's variables keeps none of them alive, and leaves what the program took by locals() alone."""

import sys
import weakref

from gradsan.graph import naming


class Thing:
    pass


def look():
    list(naming.find(sys._getframe(1), lambda tensor: False))


def test_what_a_function_deletes_after_a_look_is_freed():
    thing = Thing()
    alive = weakref.ref(thing)
    look()
    del thing
    assert alive() is None


def test_what_the_program_took_by_locals_stays():
    kept = 3
    taken = locals()
    look()
    assert taken["kept"] == kept
