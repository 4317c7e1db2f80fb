"""Meanings that names in a user's program suggest."""

from __future__ import annotations

from cases import each
from gradsan import heuristics


@each(
    ("guess", "fitting", "others"),
    [
        (heuristics.is_named_in_place, ["scale_", "_scale_", "add_noise_"], ["scale", "__call__", "__iadd__"]),
        (
            heuristics.draws_batch,
            ["sample_buffer", "sample", "draw_transitions", "get_batch", "next_minibatch", "random_batches"],
            ["resample", "drawing", "batch_norm", "get_batch_size", "sampler"],
        ),
        (
            heuristics.sets_up,
            ["Net.init_state", "reset_parameters", "_build"],
            ["initial", "loader", "forward"],
        ),
        (heuristics.is_layers_parameter, ["weight", "bias"], ["weights", "scale", "data"]),
        (heuristics.is_step_function, ["binarize", "my_round", "fake_quantise"], ["around", "scale", "designed"]),
        (heuristics.is_activation, ["act", "nonlinearity", "dropout1"], ["norm", "conv", "pool"]),
        (heuristics.is_gradient, ["g", "lr", "grad_w", "sum_of_grads"], ["weight", "loss", "x"]),
        (heuristics.wraps_for_ranks, ["DDP", "DistributedDataParallel"], ["DataParallel", "ddp", ""]),
    ],
)
def test_a_name_suggests(guess, fitting, others):
    assert [one for one in fitting if not guess(one)] == []
    assert [one for one in others if guess(one)] == []


def test_classes_begin_with_a_capital_letter():
    assert heuristics.class_names(["Net", "_Cell", "SGD", "step", "x", "_", ""]) == {"Net", "_Cell", "SGD"}


def test_a_condition_suggests_that_nothing_is_trained():
    assert heuristics.excludes_training(["self", "export"])
    assert heuristics.excludes_training(["inference_params"])
    assert not heuristics.excludes_training(["self", "training", "retrieval"])
