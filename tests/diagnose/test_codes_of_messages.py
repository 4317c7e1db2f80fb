"""Codes of a message: whole, in part, in a traceback, in the words of other versions; and none where none is meant."""

from cases import each
from gradsan.catalogue import rows
from gradsan.diagnose.messages import codes_of, of_row

VERSION = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[torch.FloatTensor [10, 10]]{output} is at version 2; expected version 1 instead. Hint: enable anomaly detection"
)
TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 12, in <module>
    loss.backward()
RuntimeError: Trying to backward through the graph a second time (or directly access saved
tensors after they have already been freed). Saved intermediate values of the graph are freed
"""


@each(
    ("text", "first"),
    [
        (VERSION.format(output=""), "GS110"),
        (VERSION.format(output=", which is output 0 of AsStridedBackward0,"), "GS110"),
        (VERSION.format(output=", which is output 0 of TBackward0,"), "GS110"),
        (VERSION.format(output=", which is output 0 of ReluBackward0,"), "GS101"),
        ("has been modified by an inplace operation", "GS101"),
        (TRACEBACK, "GS401"),
        ("backward through the graph a second time", "GS401"),
        ("a leaf Variable that requires grad is being used in an in-place operation.", "GS301"),
        ("element 0 of tensors does not require grad and does not have a grad_fn", "GS405"),
        ("element 0 of tensors does not require grad", "GS405"),
        ("element 0 of variables does not require grad and does not have a grad_fn", "GS405"),
        ("grad can be implicitly created only for scalar outputs", "GS408"),
        ("Function 'SqrtBackward0' returned nan values in its 0th output.", "GS414"),
        ("Can't call numpy() on Tensor that requires grad", "GS317"),
        ("Expected to mark a variable ready only once", "GS513"),
        ("Only Tensors created explicitly by the user support the deepcopy protocol", "GS319"),
        ("can't optimize a non-leaf Tensor", "GS321"),
    ],
)
def test_the_code_of_a_message(text: str, first: str) -> None:
    assert codes_of(text)[:1] == (first,)


@each("text", ["", "CUDA out of memory", "no such file", "the graph", "it does not require", "GS111"])
def test_no_code_where_none_is_meant(text: str) -> None:
    assert codes_of(text) == ()


def test_every_row_leads_to_a_code() -> None:
    assert [row.slug for row in rows() if not of_row(row.slug, row.raised_as)] == []


def test_the_second_half_of_the_message_about_a_freed_graph_leads_there():
    assert codes_of("saved tensors after they have already been freed")[:2] == ("GS401", "GS402")
    assert codes_of("Calling register_hooks on a saved tensor after it has been freed") == ("GS510",)
