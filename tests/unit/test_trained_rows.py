"""What does not train moves nothing: advantages are verl's of the batch without it; so are the KL controller, the means."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos, ray_trainer

from recipe.partial_rollout.manager.policies import masked_output
from recipe.partial_rollout.manager.types import Segment, TakenGroup
from recipe.partial_rollout.training.agent_loop_manager import assemble_batch
from tests.unit.conftest import build_output

R, GAMMA, LAM = 5, 0.9, 0.8


def sample(fate, reward, length):
    """One that trains, one that ``rollout_rs`` will reject, or one that failed with ``length`` tokens."""
    if fate == "failed":
        ids = np.arange(length, dtype=np.int32)
        return masked_output([Segment(ids, ids.astype(np.float32), 0)], "its tool raised")
    return build_output(length, reward=reward)


def batch_of(groups, *, colocated=False):
    """The trainer's batch of ``groups``, lists of (fate, reward, length), before its advantages."""
    taken = [
        TakenGroup(f"0/{i}", i, {"index": i}, tuple(sample(*each) for each in group), 0)
        for i, group in enumerate(groups)
    ]
    data = assemble_batch(taken, [f"slot{i}" for i in range(len(taken))], 4, R, 0)
    fates = [fate for group in groups for fate, _, _ in group]
    scores = data.batch["rm_scores"]
    if colocated:
        # The model scores whatever it is given.
        last = data.batch["attention_mask"][:, 4:].sum(-1) - 1
        for i, (_, reward, _) in enumerate(each for group in groups for each in group):
            scores[i, last[i]] = reward
    data.batch["response_mask"][[fate == "rejected" for fate in fates]] = 0
    data.batch["token_level_scores"] = data.batch["token_level_rewards"] = scores
    generator = torch.Generator().manual_seed(0)
    data.batch["values"] = torch.randint(-8, 8, scores.shape, generator=generator) / 4.0
    return data


def advantages(data, name):
    name, by_std = name.removesuffix(" without std"), "without" not in name
    algorithm = OmegaConf.create({"norm_adv_by_std_in_grpo": by_std, "gamma": GAMMA, "lam": LAM})
    return ray_trainer.compute_advantage(
        data, name, gamma=GAMMA, lam=LAM, norm_adv_by_std_in_grpo=by_std, config=algorithm
    ).batch["advantages"]


GROUPED = (
    "grpo", "grpo without std", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg",
    "reinforce_plus_plus_baseline",
)  # fmt: skip
"""estimators that compare the samples of a group"""
FATES = st.sampled_from(["good"] * 4 + ["failed", "rejected"])
SAMPLES = st.tuples(FATES, st.integers(-8, 8).map(lambda r: r / 4), st.integers(1, R))
BATCHES = st.integers(2, 5).flatmap(
    lambda n: st.lists(st.lists(SAMPLES, min_size=n, max_size=n), min_size=1, max_size=3)
)
GOOD = ("good", 1.0, 3)


@pytest.mark.parametrize("name", [*GROUPED, "reinforce_plus_plus", "gae"])
@given(groups=BATCHES, colocated=st.booleans())
@example(groups=[[GOOD, ("good", 0.0, 2), *[("failed", 0.5, 4)] * 6]], colocated=False)
@example(groups=[[GOOD, ("failed", 1.0, 4)], [GOOD, ("good", 0.0, 4)]], colocated=True)
@example(groups=[[("good", 1.0, 1), ("failed", 1.0, 4)]], colocated=False)
def test_group_and_batch_have_the_statistics_of_the_samples_that_train(name, groups, colocated):
    """A lone survivor trains only where its advantage is its own: other samples' rewards are no baseline."""
    data = batch_of(groups, colocated=colocated)
    size, trains = len(groups[0]), [fate == "good" for group in groups for fate, _, _ in group]
    flat = [each for group in groups for each in group]
    kept = [[g * size + i for i in range(size) if trains[g * size + i]] for g in range(len(groups))]
    kept = [rows for rows in kept if len(rows) > (name in GROUPED)]
    rows = [i for group in kept for i in group]
    if sum(flat[i][2] for i in rows) == 1:
        # A single token has no variance: verl refuses to whiten it, and it trains nothing where others are masked.
        assume(not all(trains))
        rows = []
    expected = torch.zeros(len(flat), R)
    if rows:
        expected[rows] = advantages(data.select_idxs(rows), name)
    got = advantages(data, name)
    trained = data.batch["response_mask"].bool()
    torch.testing.assert_close(got[trained], expected[trained])
    assert not got[~torch.tensor(trains)].any(), "what does not train has no advantage"


def test_batch_without_a_masked_sample_is_verls_own():
    data = batch_of([[GOOD, ("good", 0.0, 4)]])
    want = core_algos.compute_grpo_outcome_advantage.__wrapped__(
        data.batch["rm_scores"], data.batch["response_mask"], data.non_tensor_batch["uid"]
    )
    assert torch.equal(advantages(data, "grpo"), want[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_estimator_of_ones_own_may_compute_in_another_precision(monkeypatch, dtype):
    def own(token_level_rewards, response_mask, **kwargs):
        scores = token_level_rewards.sum(-1).to(dtype)
        advantages = (scores - scores.mean())[:, None] * response_mask
        return advantages, advantages

    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "own", own)
    got = advantages(batch_of([[GOOD, ("good", 0.0, 2), ("failed", 1.0, 4)]]), "own")
    assert got.dtype == dtype and got[:, 0].tolist() == [0.5, -0.5, 0.0]


def test_penalty_for_the_kl_divergence_and_its_controller_see_the_samples_that_train():
    data = batch_of([[GOOD, ("rejected", 1.0, 3), ("failed", 1.0, 3)]])
    data.batch["old_log_probs"], data.batch["ref_log_prob"] = torch.full((3, R), -0.5), torch.full((3, R), -1.5)
    seen = []
    controller = SimpleNamespace(value=0.1, update=lambda **told: seen.append(told))
    data, metrics = ray_trainer.apply_kl_penalty(data, controller)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(1.0)
    assert seen == [{"current_kl": pytest.approx(1.0), "n_steps": 1}]
    assert data.batch["token_level_rewards"][0].tolist() == pytest.approx([-0.1, -0.1, 0.9, 0, 0])
    assert torch.equal(data.batch["token_level_rewards"][1:], data.batch["token_level_scores"][1:])


def test_logged_means_are_those_of_the_samples_that_train():
    data = batch_of([[GOOD, ("good", 0.0, 5), ("failed", 0.0, 1), ("rejected", -2.0, 1)]])
    advantages(data, "grpo")
    data.batch["returns"] = data.batch["advantages"]
    metrics = ray_trainer.compute_data_metrics(batch=data, use_critic=False)
    assert (metrics["critic/score/mean"], metrics["critic/rewards/min"]) == (0.5, 0.0)
    assert (metrics["response_length/mean"], metrics["response_length/min"]) == (4.0, 3.0)


def test_batch_without_a_masked_sample_is_not_copied_for_its_means(monkeypatch):
    data = batch_of([[GOOD, ("good", 0.0, 5)]])
    advantages(data, "grpo")
    data.batch["returns"] = data.batch["advantages"]
    monkeypatch.setattr(data, "select_idxs", None)
    assert ray_trainer.compute_data_metrics(batch=data, use_critic=False)["critic/score/mean"] == 0.5
