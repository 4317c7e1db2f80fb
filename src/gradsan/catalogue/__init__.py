"""Catalogue of PyTorch's messages when autograd cannot go on, by structure and not by version.

Rows lie in the ``*.toml`` files of this folder, one table a row; the file's name is its topic. A row has

* ``raised_as``: the exception's or warning's class (``RuntimeError``, ``UserWarning``); subclasses count too;
* ``patterns``: regular expressions for the wordings of all PyTorch versions from 2.6 on, searched for in the message;
  the groups of the one that fits become ``Failure.values``;
* ``raised_in``: instead of patterns, where the words are the program's own, the places of torch that raise them
  (``torch/autograd/graph.py:__enter__``); the words become the value ``message``.

It reads no program and imports no torch. ``tests/catalogue`` holds the patterns against messages that the installed
torch raises and against recorded ones of older versions.
"""

from gradsan.catalogue._rows import (
    VERSION_CHECK,
    Row,
    comes_from_autograd,
    is_of_autograd,
    place_raised,
    recognise,
    rows,
)

__all__ = ["VERSION_CHECK", "Row", "comes_from_autograd", "is_of_autograd", "place_raised", "recognise", "rows"]
