"""Advice and candidates for programs in the style of users, against versions made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import user_programs as programs

from gradsan.repair.patch import Patch, PatchError

ALWAYS = {
    "accumulated_and_cleared",
    "activation_class_given",
    "actor_critic_advantage",
    "adapters_merged_for_a_look",
    "adjacency_kept_by_trainer",
    "advantages_of_kept_graph",
    "adversary_behind_a_scaler",
    "attack_projected_in_chain",
    "average_in_numpy_is_the_weight",
    "batch_clamped_through_data",
    "batch_renorm_buffers",
    "best_state_restored",
    "bounds_by_function_in_place",
    "buffer_in_inner_loop",
    "cached_gan",
    "cells_grown_in_argument",
    "centre_of_first_outputs",
    "channels_dropped_without_record",
    "checkpoint_schedule",
    "clip_helper_between",
    "clip_of_scaled_gradients",
    "clip_weights_before_backward",
    "coupling_by_slices",
    "critic_cleared_by_generator",
    "critic_left_frozen",
    "critic_steps_on_one_batch",
    "cyclegan_pool",
    "dataclass_state",
    "derivative_by_helper",
    "derivatives_of_derivatives",
    "derivatives_of_slices",
    "deviation_of_parameter_itself",
    "documents_cached_by_key",
    "embedding_replaced",
    "encoder_outside_of_closure",
    "fake_quantise",
    "features_of_two_fits",
    "fgsm_reuses_loss",
    "flat_parameters",
    "force_field",
    "function_keeps_input",
    "function_on_attacked_input",
    "function_scales_argument",
    "gradient_hook_clamps",
    "halves_of_a_buffer",
    "head_rescaled_through_data",
    "heads_in_dict",
    "hidden_in_records",
    "hinges_as_numbers",
    "images_of_two_generators",
    "images_scaled_by_epoch",
    "imagined_from_dict",
    "inner_steps_in_place",
    "keys_and_values_cached",
    "layer_on_learned_constant",
    "leaves_rebuilt_in_list",
    "lora_merge",
    "loss_before_hand_steps",
    "losses_by_name",
    "losses_of_one_method",
    "losses_walked_in_turn",
    "memory_never_cleared",
    "mixup_in_place",
    "momentum_is_gradient",
    "networks_that_teach_each_other",
    "nodes_damped_in_turn",
    "optimizers_stepped_for_each_loss",
    "out_workspace",
    "outputs_joined_by_wrapper",
    "parameter_of_expanded_row",
    "parametrize_cached",
    "path_of_one_tensor",
    "penalty_mixes_batch",
    "players_on_joint_actions",
    "power_iteration_of_two_calls",
    "pre_hook_noise",
    "prototypes_normalised_twice",
    "quantile_terms_in_tensor",
    "rollout_of_old_policy",
    "rotary_cache_inference",
    "scaled_through_data",
    "schedule_of_the_moved_step",
    "scheduler_of_first_phase",
    "state_of_trainer",
    "step_under_decorator",
    "td3_both_losses",
    "tensor_of_losses",
    "tracks_by_object_id",
    "update_helper",
    "vae_gan",
    "value_kept_for_next",
    "value_of_last_state",
    "weight_noise_removed",
    "weight_scaled_by_forward",
    "weights_of_losses_plain",
    "weights_rebound",
}
"""Few programs that together have each code with each first help, and each kind of candidate; the others are long."""


def patched(lines: programs.Lines, file: Path) -> str | None:
    try:
        return Patch().with_lines(lines).files[str(file)].decode()
    except PatchError:
        return None


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.long) for one in programs.NAMES]
)
def test_the_first_help_does_no_harm_and_some_candidate_is_right(name: str, tmp_path: Path) -> None:
    case, file = programs.case(name), tmp_path / "train.py"
    found = programs.watched(case.broken, file)
    shown = [text for one in found for lines in one.shown[:1] if lines and (text := patched(lines, file))]
    tried = [text for one in found for lines in one.tried if (text := patched(lines, file))]
    known = programs.outcomes(list(dict.fromkeys([*case.right, *case.harmful, *shown])), file)
    right, harmful = [known[text] for text in case.right], [known[text] for text in case.harmful]
    assert all(not isinstance(one, str) for one in right)
    assert not any(programs.is_one_of(one, right) for one in harmful)
    assert not any(programs.is_one_of(known[text], harmful) for text in shown)
    assert not case.first_is_right or any(programs.is_one_of(known[text], right) for text in shown)
    if case.is_for_words:
        everything = programs.outcomes(list(dict.fromkeys(tried)), file)
        assert not any(programs.is_one_of(one, harmful) for one in everything.values())
    elif not any(programs.is_one_of(known[text], right) for text in tried if text in known):
        others = programs.outcomes(list(dict.fromkeys(tried)), file)
        assert any(programs.is_one_of(one, right) for one in others.values())


TWO_LOSSES_THEN_STEPS = """
import torch
from torch import nn

torch.manual_seed(0)
G, D = nn.Linear(3, 4), nn.Linear(4, 1)
og, od = torch.optim.SGD(G.parameters(), lr=0.1), torch.optim.SGD(D.parameters(), lr=0.1)
for _ in range(3):
    fake = G(torch.randn(6, 3))
    og.zero_grad()
    od.zero_grad()
    g_loss = -D(fake.detach()).mean()
    d_loss = D(fake.detach()).mean() - D(torch.randn(6, 4)).mean()
    g_loss.backward()
    d_loss.backward()
    og.step()
    od.step()
"""


def test_of_two_losses_with_a_cut_none_is_chosen(tmp_path: Path) -> None:
    (found,) = programs.watched(TWO_LOSSES_THEN_STEPS, tmp_path / "train.py")
    assert (found.code, found.tried) == ("GS421", ())


def test_those_that_run_always_exist() -> None:
    assert set(programs.NAMES) >= ALWAYS


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames have no qualified names")
def test_a_copy_reads_easier_than_parts_put_into_new_tensors(tmp_path: Path) -> None:
    found = programs.watched(programs.case("quadrants_mixed_into_the_map").broken, tmp_path / "train.py")
    assert [text.strip() for _, _, text in found[0].shown[0]] == ["drawn = image.clone()"]
