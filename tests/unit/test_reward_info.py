"""What rewards say beside the score reaches the trainer, and the means of a validation; also of a colocated model."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.experimental.reward_loop import RewardLoopManager, reward_loop
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward import extract_reward

from recipe.partial_rollout.manager.policies import SAMPLE_ERROR
from recipe.partial_rollout.training.reward_info import objects
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer, TrainerRun
from recipe.partial_rollout.worker.rewards import REWARD_INFO, RewardError
from tests.unit.shared import byte_tokenizer
from tests.unit.test_failing_samples import Loop, R, generated, reward_worker, rows


@pytest.fixture(params=["legacy", "v1"])
def trainers(request):
    """The recipe's class of a trainer and verl's."""
    if request.param == "legacy":
        return PartialRolloutRayPPOTrainer, RayPPOTrainer
    pytest.importorskip("transfer_queue")
    from verl.trainer.ppo.v1 import PPOTrainerSync

    from recipe.partial_rollout.training.v1.trainer import PartialRolloutPPOTrainer

    return PartialRolloutPPOTrainer, PPOTrainerSync


def validated(monkeypatch, tmp_path, trainers, *batches):
    """verl's validation over ``batches`` of generated samples; returns its metrics and what it wrote."""
    kind, verls = trainers
    trainer, outputs, written = object.__new__(kind), iter(batches), []
    rollout = {"val_kwargs": SimpleNamespace(n=1, do_sample=False), "agent": SimpleNamespace(num_workers=1)}
    logs = SimpleNamespace(log_val_generations=0, get=lambda key, default=None: str(tmp_path))
    parts = SimpleNamespace(rollout=SimpleNamespace(**rollout))
    trainer.config = SimpleNamespace(actor_rollout_ref=parts, trainer=logs)
    uids = [each.non_tensor_batch.get("uid", np.arange(len(each)) + id(each)) for each in batches]
    trainer.val_dataloader = [{"dummy": torch.zeros(len(each), 1), "uid": each} for each in uids]
    trainer.tokenizer = byte_tokenizer("", pad_token="<pad>", eos_token="<eos>")
    trainer.async_rollout_manager = SimpleNamespace(generate_sequences=lambda prompts: next(outputs))
    trainer.use_rm, trainer.global_steps, trainer.proximal = False, 1, SimpleNamespace(from_update=False)
    monkeypatch.setattr(verls, "_dump_generations", lambda self, *args: written.append(args[4]))
    return super(TrainerRun, trainer)._validate(), written[0]


def mixed(data_source, solution_str, ground_truth, extra_info):
    return [
        {"score": 1.0, "depth": 3, "pred": 12},
        {"score": 0.0, "depth": None, "pred": "none"},
        {"score": 1.0, "steps": [1, 2]},
        math.nan,
    ][ground_truth]


def test_workers_whose_samples_have_different_keys_make_one_batch():
    output = generated(mixed, rows(2, 2, 2), chunks=3)
    assert output.meta_info["reward_extra_keys"] == ["score", "depth", "pred", "steps"]
    assert output.non_tensor_batch["depth"].tolist() == [3, None, None]
    assert output.non_tensor_batch["steps"].tolist() == [None, None, [1, 2]]


def test_validation_averages_numbers_over_batches_with_different_keys(monkeypatch, tmp_path, trainers):
    whole = rows(2, 2, 2, 2)
    batches = [generated(mixed, whole[i : i + 2], validate=True) for i in (0, 2)]
    metrics, written = validated(monkeypatch, tmp_path, trainers, *batches)
    assert metrics["val-core/unknown/reward/mean@1"] == pytest.approx(2 / 3), "without the one that has no score"
    assert metrics["val-aux/unknown/depth/mean@1"] == 3.0
    assert not [name for name in metrics if "pred" in name or "steps" in name]
    assert written["pred"] == [12, "none", None, None] and written["steps"] == [None, None, [1, 2], None]
    assert "prompt uid3" in written["sample_error"][3]


@pytest.mark.parametrize("by_model", [False, True])
def test_words_of_a_reward_or_a_loop_about_an_error_are_no_failure(monkeypatch, tmp_path, trainers, by_model):
    """A judge may say what was wrong with an answer; the mark of a failed sample is ours alone."""
    run = Loop.run

    async def says(self, sampling_params, **row):
        output = await run(self, sampling_params, **row)
        output.extra_fields |= {SAMPLE_ERROR: "the loop's", REWARD_INFO: {SAMPLE_ERROR: "the loop's"}}
        return output

    monkeypatch.setattr(Loop, "run", says)
    wrong = {"score": 1.0, SAMPLE_ERROR: "wrong units"}
    output = generated(lambda **_: wrong, rows(2, 3), validate=True, handles=None if by_model else ())
    output = colocated(monkeypatch, lambda **_: wrong, output) if by_model else output
    metrics, written = validated(monkeypatch, tmp_path, trainers, output)
    assert [value for name, value in metrics.items() if name.endswith("/reward/mean@1")] == [1.0]
    assert written["reward_sample_error"] == ["wrong units"] * 2 and SAMPLE_ERROR not in written


def test_values_that_cannot_be_averaged_or_written_are_text(monkeypatch, tmp_path, trainers):
    odd = [{"score": 1.0, "big": 10**300, "text": "\ud800"}, {"score": 0.0, "big": 1, "text": {(1, 2): 3}}]
    output = generated(lambda ground_truth, **_: odd[ground_truth], rows(2, 2), validate=True)
    metrics, written = validated(monkeypatch, tmp_path, trainers, output)
    assert metrics["val-core/unknown/reward/mean@1"] == 0.5 and not [name for name in metrics if "big" in name]
    assert written["text"] == [r"'\ud800'", "{(1, 2): 3}"] and written["big"] == [10**300, 1]


def test_reward_that_writes_into_its_extra_info_changes_no_other_score():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        extra_info["seen"] = seen = extra_info.get("seen", 0) + 1
        extra_info["list"].append(1)
        return float(seen == 1 and len(extra_info["list"]) == 1)

    shared = {"list": []}
    output = generated(compute_score, rows(2, 2, 2, extra_info=[shared] * 3))
    assert output.batch["rm_scores"].sum(-1).tolist() == [1.0] * 3 and shared == {"list": []}


# -- a reward model that shares its devices with the engines: the batch is scored once they sleep ----------------------


def colocated(monkeypatch, function, batch, *, parts=None):
    """``batch`` as verl's trainer goes on with it, scored by one worker with ``function``."""

    async def gathered(calls):
        return await asyncio.gather(*calls)

    async def compute_score_batch(data):
        return await reward_worker(function).compute_score_batch(data)

    monkeypatch.setattr(reward_loop.ray, "get", lambda calls: asyncio.run(gathered(calls)))
    trainer = object.__new__(PartialRolloutRayPPOTrainer)
    trainer.settings = SimpleNamespace(deadlines=SimpleNamespace(reward_s=5.0))
    trainer.reward_loop_manager = manager = object.__new__(RewardLoopManager)
    handle = SimpleNamespace(compute_score_batch=SimpleNamespace(remote=compute_score_batch))
    manager.reward_loop_workers, manager.reward_manager_cls = [handle], NaiveRewardManager
    manager.reward_model_manager = None
    manager.config = SimpleNamespace(algorithm={"adv_estimator": "gdpo", "gdpo_reward_keys": parts})
    return batch.union(trainer._compute_reward_colocate(batch))


def test_colocated_model_scores_a_batch_on_its_generated_tokens(monkeypatch):
    batch = generated(None, rows(2, 3), handles=None)
    batch.batch["response_mask"][1, 1:] = 0
    output = colocated(monkeypatch, lambda **_: {"score": 1.0, "acc": 0.5}, batch)
    assert output.batch["rm_scores"].nonzero().tolist() == [[0, 1], [1, 0]]
    _, infos = extract_reward(output)
    assert {key: list(column) for key, column in infos.items()} == {"score": [1.0, 1.0], "acc": [0.5, 0.5]}


@pytest.mark.parametrize("validate", [False, True])
def test_colocated_model_may_give_each_sample_keys_of_its_own(monkeypatch, tmp_path, trainers, validate):
    """verl makes columns of the first sample's keys."""
    given = [{"score": 1.0, "returns": 2.0}, {"score": 0.0, "why": [1, 2]}, 1.0]
    unscored = generated(None, rows(2, 2, 2), validate=validate, handles=None)
    output = colocated(monkeypatch, lambda ground_truth, **_: given[ground_truth], unscored)
    if validate:
        metrics, found = validated(monkeypatch, tmp_path, trainers, output)
        assert metrics["val-core/t/acc/mean@1"] == 1.0
    else:
        found = {key: list(column) for key, column in extract_reward(output)[1].items()}
    assert found["reward_returns"] == [2.0, None, None] and found["why"] == [None, [1, 2], None]
    assert found["acc"] == [None, None, 1.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"score": math.nan}, "reward of prompt uid0 is nan"),
        ({"score": 1.0}, r"form \(algorithm\.gdpo_reward_keys\) in the reward of prompt uid0 is None"),
    ],
)
def test_colocated_model_without_what_trains_ends_the_run_by_name(monkeypatch, given, words):
    batch = generated(None, rows(2), handles=None)
    batch.non_tensor_batch["uid"] = objects(["uid0"])
    with pytest.raises(RewardError, match=words):
        colocated(monkeypatch, lambda **_: given, batch, parts=["form"])


def test_validation_with_a_colocated_model_leaves_out_a_failed_sample(monkeypatch, tmp_path, trainers):
    """One sample is too long for its batch, and the only one of its worker."""

    def by_truth(data_source, solution_str, ground_truth, extra_info):
        return {"score": float(ground_truth == 1), "depth": 3}

    unscored = generated(None, rows(R + 1, 2, 2), validate=True, chunks=3, handles=None)
    assert "rm_scores" not in unscored.batch
    output = colocated(monkeypatch, by_truth, unscored)
    metrics, written = validated(monkeypatch, tmp_path, trainers, output)
    assert metrics["val-core/t/reward/mean@1"] == 0.5
    assert "a response of 9 tokens" in written["sample_error"][0]
