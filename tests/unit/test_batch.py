"""The batch contract: shapes, sides, masks, and what happens to a sample that does not fit.

What does not train moves nothing: advantages are verl's of the batch without it; so are the KL controller, the means.
"""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer

from recipe.partial_rollout.manager.policies import masked_output
from recipe.partial_rollout.manager.types import Segment, TakenGroup
from recipe.partial_rollout.records.run_log import RolloutPhase
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.training.agent_loop_manager import (
    ObservedAgentLoopManager,
    PartialRolloutAgentLoopManager,
    assemble_batch,
)
from recipe.partial_rollout.training.reward_info import objects, spread_infos
from recipe.partial_rollout.worker.loop_rows import LOOP_FIELDS
from recipe.partial_rollout.worker.rewards import REWARD_INFO
from tests.unit.conftest import build_output
from tests.unit.shared import settings_of


def groups(output, *, count=2, n=2, lengths=(3, 5), reward=1.0):
    row = {"data_source": "t", "reward_model": {"ground_truth": "g"}, "index": 7}
    return [
        TakenGroup(f"0/{i}", i, row, tuple(output(length, version=i, reward=reward) for length in lengths[:n]))
        for i in range(count)
    ]


def assemble(taken):
    return assemble_batch(taken, [f"slot{i}" for i in range(len(taken))], 6, 8, pad_id=0)


def test_prompts_are_padded_left_and_responses_right(output):
    data = assemble(groups(output))
    assert list(data.non_tensor_batch["uid"]) == ["slot0", "slot0", "slot1", "slot1"]
    assert list(data.non_tensor_batch["data_source"]) == ["t"] * 4 and data.meta_info["reward_extra_keys"] == ["acc"]
    batch = data.batch
    assert batch["prompts"][0].tolist() == [0, 0, 1, 2, 3, 4]
    assert batch["responses"][0].tolist() == [10, 11, 12, 0, 0, 0, 0, 0]
    assert batch["input_ids"][0].tolist() == [0, 0, 1, 2, 3, 4, 10, 11, 12, 0, 0, 0, 0, 0]
    assert batch["attention_mask"][0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert batch["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 6]
    assert batch["rollout_versions"][2].tolist() == [1, 1, 1, -1, -1, -1, -1, -1]
    assert batch["rollout_log_probs"][2].tolist() == pytest.approx([-0.5] * 3 + [0.0] * 5)
    assert batch["rollout_log_probs"].dtype == torch.float32 and batch["rollout_versions"].dtype == torch.int32
    assert assemble(groups(output, lengths=(0, 2))).batch["response_mask"][0].sum() == 0


def test_score_sits_on_the_last_generated_token_unless_a_model_scores_later(output):
    """A trajectory may end in a tool's text: ``gae`` and ``reinforce_plus_plus`` lose a score on a token with mask 0."""
    (group,) = groups(output, count=1, n=1)
    made = output(3, reward=-1.0)
    text = {"response_ids": 9, "response_mask": 0, "log_probs": 0, "versions": -1}
    ended = {key: np.append(getattr(made, key), [fill] * 2) for key, fill in text.items()}
    ended = {key: part.astype(getattr(made, key).dtype) for key, part in ended.items()}
    scores = assemble([replace(group, outputs=(*group.outputs, replace(made, **ended)))]).batch["rm_scores"]
    assert scores.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, -1, 0, 0, 0, 0, 0]]
    unscored = assemble(groups(output, reward=None))
    assert "rm_scores" not in unscored.batch and "reward_extra_keys" not in unscored.meta_info
    assert list(unscored.non_tensor_batch["index"]) == [7] * 4


def test_noprs_scores_reach_generated_tokens_too():
    scores, mask = torch.tensor([[0.0, 0, 0, 1]]), torch.tensor([[1, 1, 0, 0]])
    for validate, found in ((False, [[0, 1, 0, 0]]), (True, [[0, 0, 0, 1]])):
        dictionaries = {REWARD_INFO: objects([{}]), LOOP_FIELDS: objects([{}])}
        batch = DataProto.from_single_dict({"rm_scores": scores, "response_mask": mask, **dictionaries})
        spread_infos(batch, validate=validate)
        assert batch.batch["rm_scores"].tolist() == found


def test_dataset_may_have_columns_named_like_something_of_the_trainers(output):
    """verl's update asserts that no two have a name; under noPR these columns do not come as far as the trainer."""
    own = dict.fromkeys(("responses", "advantages", "temperature", "multi_turn"), 0.7)
    data = assemble([replace(group, row={**group.row, **own}) for group in groups(output)])
    data.batch["advantages"] = torch.zeros(4, 8)
    data.meta_info |= {"temperature": 1.0, "multi_turn": False}
    assert data.to_tensordict()["advantages"].shape == (4, 8)


def with_masked(output, *rewards, masked, tokens=2):
    (group,) = groups(output, count=1)
    made = Segment(np.arange(tokens, dtype=np.int32) + 5, np.zeros(tokens, np.float32), 0)
    gone = masked_output([made], "its tool raised")
    good = [output(3, reward=reward) for reward in rewards]
    return assemble([replace(group, outputs=(*good, *[gone] * masked))])


def test_masked_sample_has_no_prompt_that_shows_images(output):
    """Its micro-batch would have the tokens of a sibling's image and no pixels, and the update would die."""
    (group,) = groups(output, count=1)
    shows = replace(group.outputs[0], images=(0,))
    gone = masked_output([], "its tool raised")
    for siblings, prompt in (((shows, shows), [0, 0]), ((shows, group.outputs[1]), [3, 4])):
        data = assemble([replace(group, outputs=(*siblings, gone))])
        assert data.batch["prompts"][2, -2:].tolist() == prompt


def test_masked_sample_trains_no_token_and_has_no_reward(output):
    data = with_masked(output, 1.0, 0.0, masked=1)
    row = data.batch[2]
    assert row["responses"].tolist()[:2] == [5, 6]
    assert row["response_mask"].sum() == 0 and row["rollout_log_probs"].abs().sum() == 0
    assert row["prompts"].tolist() == data.batch[0]["prompts"].tolist()
    assert not row["rm_scores"].any()
    assert data.non_tensor_batch["acc"].tolist() == [1.0, 0.0, None]
    none_left = with_masked(output, masked=2).batch
    assert none_left["rm_scores"].sum() == 0 and none_left["response_mask"].sum() == 0
    longer = with_masked(output, 1.0, masked=1, tokens=12).batch[1]
    assert longer["responses"].tolist() == list(range(5, 13)) and longer["attention_mask"].sum() == 4 + 8


def test_samples_of_a_prompt_share_nothing_that_a_reward_could_write(output):
    data = assemble(groups(output))
    data.non_tensor_batch["reward_model"][0]["num_turns"] = 7
    assert data.non_tensor_batch["reward_model"][1] == {"ground_truth": "g"}


async def test_batch_has_verls_timings_of_its_samples(output):
    taken = groups(output)
    first = replace(taken[0].outputs[0], metrics={"generate_sequences": 9.0, "tool_calls": 1.0, "untrained_tokens": 2})
    taken[0] = replace(taken[0], outputs=(first, *taken[0].outputs[1:]))
    manager = object.__new__(PartialRolloutAgentLoopManager)
    rollout = SimpleNamespace(n=2, prompt_length=6, response_length=8)
    manager.config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    manager.connect(
        None, None, None, lambda batch, step: None, 0, SimpleNamespace(next_batch=AsyncMock(return_value=taken))
    )
    slots = DataProto.from_dict({}, non_tensors={"uid": np.array(list("aabb"), object)}, meta_info={"global_steps": 1})
    timing = (await manager.generate_sequences(slots)).meta_info["timing"]
    assert timing["agent_loop/tool_calls/max"] == 1 and timing["agent_loop/slowest/response_length"] == 3


@pytest.mark.parametrize(
    "columns", [{"raw_prompt": ["a"], "index": 1}, {"raw_prompt": ["a"]}, {"index": 1}, {"mine": 1}]
)
def test_round_of_nopr_is_noted_whatever_columns_the_users_dataset_has(columns):
    named = {key: np.array([value, None], dtype=object)[[0, 0]] for key, value in columns.items()}
    tensors = {key: torch.ones(2, 4, dtype=torch.long) for key in ("attention_mask", "prompts", "response_mask")}
    batch = DataProto.from_dict(tensors, non_tensors=named, meta_info={"global_steps": 1})
    manager = object.__new__(ObservedAgentLoopManager)
    manager.connect(SimpleNamespace(settings=settings_of(batch=2)), TrainingSteps(1, 1, 1), None, None, 0, None)
    round_ = manager._round(RolloutPhase(0.0, 1.0, ()), batch, batch)
    assert len({group.prompt for group in round_.trained}) == 1


# -- rows that do not train --------------------------------------------------------------------------------------------


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


def test_kl_penalty_and_its_controller_see_the_samples_that_train():
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
