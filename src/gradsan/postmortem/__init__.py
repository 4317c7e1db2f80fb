"""Post-mortem analysis: the events of an unwatched program, inferred from its source and its failed graph.

``walk`` follows the source from the outermost frame as the interpreter would, without running any of it, and
resolves names with the program's live objects. The operations, writes, steps and backward calls on that path
are the events of a *script*. ``align`` matches the Nodes of the graph with the operations of the script. ``log`` then
has the interface of the recorder's logs, so that all code for a watched run works on it.
"""

from gradsan.postmortem.log import ScriptLog, ScriptSteps
from gradsan.postmortem.reading import log_of

__all__ = ["ScriptLog", "ScriptSteps", "log_of"]
