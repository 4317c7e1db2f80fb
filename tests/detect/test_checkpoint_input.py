"""The version error that checkpoint raises for an input it kept: checkpoint is named as what saved it."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradsan


def test_the_call_of_checkpoint_is_where_the_value_was_saved():
    def train(weight):
        hidden = weight * 2
        out = checkpoint(lambda x: x.sin().exp(), hidden, use_reentrant=False)
        hidden += out
        hidden.sum().backward()

    with gradsan.watch() as watched, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(torch.ones(3, requires_grad=True))
    (found,) = watched.diagnoses
    assert found.code == "GS102"
    assert found.tensor.name == "hidden"
    assert found.tensor.op == "checkpoint"
    assert [label.role for label in found.labels] == ["saved", "written", "used"]
    assert found.labels[0].frame.line + 1 == found.labels[1].frame.line
