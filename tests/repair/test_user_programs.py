"""Advice and candidates for programs in the style of users, against versions made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import user_programs as programs

from gradsan.repair.patch import Patch, PatchError

ALWAYS = {
    "networks_that_teach_each_other",
    "keys_and_values_cached",
    "targets_updated_in_forward",
    "old_probabilities_and_values",
    "derivatives_of_derivatives",
    "clip_of_scaled_gradients",
    "head_after_optimizer",
    "relativistic_losses",
    "residual_sums_in_place",
    "state_in_buffer",
    "weights_backed_up_by_data",
    "loss_before_hand_steps",
    "number_beside_state",
    "layers_trained_alone",
    "weights_set_once",
    "head_rescaled_through_data",
    "centre_of_first_outputs",
    "losses_of_one_method",
    "memory_in_deque",
    "codes_of_old_discriminator",
    "step_under_decorator",
    "players_on_joint_actions",
    "third_optimizer_of_both",
    "channels_dropped_without_record",
    "encoder_outside_of_closure",
    "coefficients_projected_by_row",
    "rollout_of_old_policy",
    "accumulated_and_cleared",
    "frozen_state",
    "policy_loss_on_joined_lines",
    "gan_of_a_batch",
    "weights_perturbed_by_functions",
    "attack_projected_in_chain",
    "gan_by_methods",
    "halves_of_a_buffer",
    "probe_in_dict_of_losses",
    "targets_of_sweeps",
    "cells_grown_in_argument",
    "critic_cleared_by_generator",
    "critics_frozen_by_list",
    "snapshot_by_method",
    "adjacency_kept_by_trainer",
    "best_state_restored",
    "critic_left_frozen",
    "encoder_of_two_optimizers",
    "images_scaled_by_epoch",
    "losses_walked_in_turn",
    "weights_of_losses_plain",
    "images_of_two_generators",
    "adapters_merged_for_a_look",
    "actor_critic_advantage",
    "batch_clamped_through_data",
    "buffer_in_inner_loop",
    "cached_gan",
    "checkpoint_schedule",
    "clip_helper_between",
    "clip_through_data_after_step",
    "clip_weights_before_backward",
    "coupling_by_slices",
    "critic_steps_on_one_batch",
    "cyclegan_pool",
    "dataclass_state",
    "ema_of_leaves",
    "embedding_replaced",
    "fake_quantise",
    "fgsm_reuses_loss",
    "flat_parameters",
    "force_field",
    "function_keeps_input",
    "gradient_hook_clamps",
    "hook_clamps_output",
    "leaves_rebuilt_in_list",
    "keys_kept_from_first_batch",
    "imagined_from_dict",
    "learned_start",
    "lora_merge",
    "memory_never_cleared",
    "out_workspace",
    "outputs_in_leaf",
    "parametrize_cached",
    "path_of_one_tensor",
    "penalty_mixes_batch",
    "ppo_old_probabilities",
    "pre_hook_noise",
    "prototypes_updated",
    "queue_before_backward",
    "refined_by_name",
    "rollout_storage",
    "rotary_cache_inference",
    "scaled_through_data",
    "state_of_trainer",
    "states_given_by_update",
    "states_kept_by_recorder",
    "tensor_of_losses",
    "vae_gan",
    "step_for_each_optimizer",
    "images_without_graph",
    "momentum_is_gradient",
    "inner_steps_in_place",
    "derivatives_of_slices",
    "value_kept_for_next",
    "heads_in_dict",
    "critic_stepped_by_helper",
    "inner_steps_in_ordered_dict",
    "value_of_last_state",
    "parts_cleared_in_method",
    "quantile_terms_in_tensor",
    "hinges_as_numbers",
    "documents_cached_by_key",
    "advantages_of_kept_graph",
    "inner_steps_of_wrapped_zip",
    "power_iteration_of_two_calls",
    "condition_dropped_by_rows",
    "optimizer_written_in_tabs",
    "errors_kept_as_priorities",
    "slow_weights_are_the_fast",
    "hessian_vector_product",
    "deviation_of_parameter_itself",
    "weight_centred_by_second_name",
    "langevin_steps_on_leaf",
    "temperature_of_log_probabilities",
    "statistics_by_views",
    "trunk_stepped_for_each_task",
    "function_scales_argument",
    "fast_weights_by_index",
    "steps_after_both_backwards",
    "states_by_layer_name",
}
"""Each code with each kind of first help, and each kind of candidate, is met by one of these; the others are long."""


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
    if not any(programs.is_one_of(known[text], right) for text in tried if text in known):
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
