"""For the whole suite: a sentence without words or values is an error, never a gap in a report."""

from __future__ import annotations

import os

os.environ["GRADSAN_TEXT"] = "strict"
os.environ["GRADSAN_DEBUG"] = "1"
