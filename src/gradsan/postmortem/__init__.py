"""Post-mortem reading: what a program must have done, read off its source and its failed graph.

The way: ``walk`` follows the source from the outermost frame as the interpreter would, without running any of it, with
the program's live objects to tell what a name stands for. What it meets (operations, writes, steps, backward calls)
are the events of a *script*. ``align`` lays the Nodes of the graph beside the operations of the script. ``log`` then
answers as the recorder's logs do, so that all that is made for a watched run works on it.
"""

from gradsan.postmortem.log import RehearsedLog, RehearsedSteps
from gradsan.postmortem.reading import rehearse

__all__ = ["RehearsedLog", "RehearsedSteps", "rehearse"]
