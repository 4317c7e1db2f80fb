"""A loss of several elements whose backward a library calls: where the program made it, if the program did."""

from __future__ import annotations

import runpy
import sys
import threading

import pytest

import gradsan
from cases import each

LIBRARY = """
def scaled(loss):
    (loss / 2).backward()

def trained(net, x):
    net(x).log_softmax(1).neg().backward()
"""
PROGRAM = """
import torch
import training_library

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)

net, x = Net(3, 2), torch.ones(4, 3)
error = net(x).exp()
training_library.{call}
"""


@each("call, name", [("scaled(error)", "error"), ("trained(net, x)", None)])
def test_only_a_loss_that_was_scaled_is_the_programs(tmp_path, monkeypatch, call, name):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "training_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.delitem(sys.modules, "training_library", raising=False)
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.format(call=call))
    watched, raised = gradsan.watch(), []

    def run():
        with pytest.raises(RuntimeError, match="only for scalar outputs") as caught, watched:
            runpy.run_path(str(file))
        raised.append(caught.value)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [found] = watched.diagnoses
    assert (found.code, found.tensor and found.tensor.name) == ("GS408", name)
    assert bool(found.fixes[0].lines) == (name is not None)
