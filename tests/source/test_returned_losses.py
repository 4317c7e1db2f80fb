"""Cuts of a loss that a method returns to a library, found in its source alone."""

from __future__ import annotations

from cases import each
from gradsan.source import cuts_of_returned_loss

STEP = """
class Fit:
    def training_step(self, batch, index):
        {body}

    def compared(self, x):
        return self.net(x).data - x
"""
OTHER = """
class Later:
    def training_step(self, batch, index):
        return self.net(batch).{read}.mean()
"""


@each(
    "body, other, operands",
    [
        ("return self.net(batch).detach().mean()", "pow(2)", ["self.net(batch)"]),
        ("return {'loss': self.compared(batch).mean(), 'seen': self.net(batch)}", "pow(2)", ["self.net(x)"]),
        # A target is cut on purpose, and so is what is returned for a log.
        ("return (self.net(batch) - self.teacher(batch).detach()).mean()", "pow(2)", []),
        ("loss = self.net(batch).mean(); self.manual_backward(loss); return loss.detach()", "pow(2)", []),
        ("return self.net(batch).detach().mean()", "detach()", []),
    ],
)
def test_the_one_loss_without_a_graph(tmp_path, body, other, operands):
    files = [tmp_path / "fit.py", tmp_path / "later.py"]
    files[0].write_text(STEP.replace("{body}", body))
    files[1].write_text(OTHER.format(read=other))
    assert [cut.operand for cut in cuts_of_returned_loss(map(str, files))] == operands
