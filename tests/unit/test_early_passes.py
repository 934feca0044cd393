"""Passes over groups that are ready: which run, over how many, and what the batch takes from them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from verl.protocol import DataProto

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.errors import ConfigError
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight.settings_check import check_settings
from recipe.partial_rollout.training.early_passes import OLD, REFERENCE, VALUES, EarlyPasses, passes_of

SPLIT = "actor_rollout_ref.actor.ppo_mini_batch_size=4"


def composed(*overrides):
    with initialize_config_dir(str(main_ppo.CONF_DIR), version_base=None):
        config = compose("quickstart_cpu", overrides=list(overrides))
    return config, PartialRolloutConfig.from_config(config)


@pytest.mark.parametrize(
    ("override", "passes"),
    [
        (SPLIT, [OLD]),
        ("partial_rollout.proximal=recompute", [OLD]),
        ("actor_rollout_ref.actor.use_kl_loss=True", [REFERENCE]),
        ("algorithm.use_kl_in_reward=True", [OLD, REFERENCE]),
        ("critic.enable=True", [VALUES]),
    ],
)
def test_passes_are_those_that_the_update_waits_for(override, passes):
    assert passes_of(*composed(override)) == passes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.use_dynamic_bsz=False", "actor.use_dynamic_bsz=False: True with"),
        ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False", "ref.log_prob_use_dynamic_bsz=False: True with"),
        ("actor_rollout_ref.actor.use_prefix_grouper=True", "use_prefix_grouper=True: False with"),
    ],
)
def test_passes_that_cannot_run_over_a_few_groups_are_refused(override, message):
    config, _ = composed(
        SPLIT, "actor_rollout_ref.actor.use_kl_loss=True", "partial_rollout.early_passes=True", override
    )
    with pytest.raises(ConfigError, match=message):
        check_settings(config)


@pytest.mark.parametrize(("unit", "samples", "groups"), [(1, 8, 1), (8, 8, 1), (16, 8, 2), (6, 4, 3)])
def test_ranks_get_equal_shares(unit, samples, groups):
    assert EarlyPasses({}, unit, samples, check_every=0).least_groups == groups


def test_rows_of_a_pass_are_split_evenly_however_actor_reference_and_critic_are_split():
    config, settings = composed(
        SPLIT, "critic.enable=True", "partial_rollout.early_passes=True", "trainer.n_gpus_per_node=16"
    )
    trainer: Any = SimpleNamespace(config=config, settings=settings)
    early = EarlyPasses.of(trainer)
    assert early is not None and early.least_groups == 2, "16 rows, in groups of 8"


def build_rows(*tokens):
    ids = torch.tensor(tokens).unsqueeze(1).repeat(1, 2)
    ones = torch.ones_like(ids)
    return DataProto.from_single_dict(
        {"prompts": ids[:, :1], "input_ids": ids, "attention_mask": ones, "response_mask": ones[:, 1:]}
    )


class Weights:
    """A model whose log-prob of a row is its token times the weight."""

    value, passes = 1.0, 0

    def __call__(self, rows):
        self.passes += len(rows)
        return DataProto.from_single_dict({"old_log_probs": rows.batch["input_ids"][:, 1:] * self.value})


def test_batch_takes_what_was_computed_early_and_the_share_is_told():
    weights = Weights()
    early = EarlyPasses({OLD: weights}, 1, 1, check_every=0)
    early.begin()
    early.run(build_rows(1, 2, 3))
    found = early.of_batch(OLD, build_rows(3, 2, 5, 6), step=1)
    assert found.batch["old_log_probs"].flatten().tolist() == [3.0, 2.0, 5.0, 6.0]
    assert weights.passes == 5
    assert early.take_metrics() == {"early_passes/share": 0.5, "early_passes/unused_rows": 1}


def test_next_batch_takes_nothing_from_the_weights_before():
    weights = Weights()
    early = EarlyPasses({OLD: weights}, 1, 1, check_every=1)
    early.begin()
    early.run(build_rows(1, 2))
    weights.value = 2.0
    early.begin()
    assert early.of_batch(OLD, build_rows(1, 2), step=1).batch["old_log_probs"].flatten().tolist() == [2.0, 4.0]
    assert early.take_metrics()["early_passes/error"] == 0.0


def test_check_shows_results_of_other_weights():
    weights = Weights()
    early = EarlyPasses({OLD: weights}, 1, 1, check_every=2)
    early.begin()
    early.run(build_rows(1, 2))
    weights.value = 1.5
    early.of_batch(OLD, build_rows(1, 2), step=1)
    assert "early_passes/error" not in early.take_metrics()
    early.of_batch(OLD, build_rows(1, 2), step=2)
    assert early.take_metrics()["early_passes/error"] == 1.0
