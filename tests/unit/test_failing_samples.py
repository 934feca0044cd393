"""Samples that are too long, or whose reward fails: on verl's own path (noPR, validation), and with a colocated model."""

import asyncio
import contextlib
import math
import re
import time
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.reward_loop import RewardLoopManager, RewardLoopWorker, reward_loop
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward import extract_reward

from recipe.partial_rollout.config.settings import FailureLimits, FilterSettings
from recipe.partial_rollout.manager.types import RolloutFailedError
from recipe.partial_rollout.training.agent_loop_manager import ObservedAgentLoopManager
from recipe.partial_rollout.training.reward_info import spread_infos
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer, TrainerRun
from recipe.partial_rollout.waits import ReplicaError
from recipe.partial_rollout.worker.observed import ObservedAgentLoopWorker, OverlongError
from recipe.partial_rollout.worker.rewards import REWARD_INFO, RewardError
from tests.unit.loop_life import output_of
from tests.unit.shared import byte_tokenizer

P, R = 6, 8


class Loop:
    """Returns a response of as many tokens as its row says."""

    runs = 0
    fails = ()
    """of the runs of the first row, by number; "made": the constructor"""
    error = OSError("no sandbox")

    def __init__(self, **_):
        if "made" in Loop.fails:
            raise OSError("no sandbox")

    async def run(self, sampling_params, **row):
        type(self).runs += 1
        length = row["length"]
        if row.get("uid") == "uid0" and Loop.runs in Loop.fails:
            raise Loop.error
        return output_of([1, 2, 3], [65] * length, response_logprobs=[-0.5] * length)


def reward_worker(function):
    """verl's, with ``function`` as the user's."""
    made = object.__new__(RewardLoopWorker)
    made.config = SimpleNamespace(reward=SimpleNamespace(custom_reward_function=SimpleNamespace(path="x")))
    made.reward_manager = object.__new__(NaiveRewardManager)
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: "!" * len(ids))
    vars(made.reward_manager).update(
        compute_score=function,
        is_async_reward_score=asyncio.iscoroutinefunction(function),
        tokenizer=words,
        reward_router_address=None,
        loop=asyncio.get_running_loop(),
    )
    return made


def local(worker):
    """Called like an actor handle."""
    return SimpleNamespace(compute_score=SimpleNamespace(remote=worker.compute_score))


def worker(function, *, sample_retries=2, reward_s=5.0, handles=()):
    made = object.__new__(ObservedAgentLoopWorker)
    limits = FailureLimits(sample_retries=sample_retries)
    deadlines = SimpleNamespace(reward_s=reward_s)
    settings = SimpleNamespace(failures=limits, deadlines=deadlines)
    rollout = dict.fromkeys(("temperature", "top_p", "top_k"), 1.0) | {"prompt_length": P, "response_length": R}
    agent = SimpleNamespace(default_agent_loop="mine")
    validation = SimpleNamespace(top_p=1.0, top_k=-1, temperature=0.0)
    tokenizer = byte_tokenizer("", pad_token="<pad>")
    vars(made).update(
        config=SimpleNamespace(partial_rollout=settings, data={}, trainer=SimpleNamespace(save_freq=-1)),
        rollout_config=SimpleNamespace(**rollout, agent=agent, val_kwargs=validation, calculate_log_probs=True),
        tokenizer=tokenizer,
        tools=[],
        distillation_enabled=False,
        reward_loop_worker_handles=[local(reward_worker(function))] if handles is not None else None,
        _rewards=contextlib.nullcontext(),
    )
    for name in ("processor", "llm_client", "hf_model_type", "dataset_cls", "mm_processor_kwargs"):
        setattr(made, name, None)
    return made


def rows(*lengths, **columns):
    fields = {
        "raw_prompt": [[{"role": "user", "content": "?"}]] * len(lengths),
        "length": list(lengths),
        "uid": [f"uid{i}" for i in range(len(lengths))],
        "data_source": ["t"] * len(lengths),
        "reward_model": [{"ground_truth": i} for i in range(len(lengths))],
        **columns,
    }
    arrays = {key: np.empty(len(lengths), dtype=object) for key in fields}
    for key, values in fields.items():
        arrays[key][:] = values
    return DataProto(TensorDict({"dummy": torch.zeros(len(lengths), 1)}, len(lengths)), arrays)


def generated(function, batch, *, validate=False, most=1.0, chunks=1, **options):
    """What verl's trainer gets of ``batch``: from the worker, ``chunks`` of them, by way of verl's manager and ours."""
    Loop.runs = 0
    batch.meta_info["validate"] = validate
    failures = SimpleNamespace(max_masked_fraction=most)
    manager = object.__new__(ObservedAgentLoopManager)
    manager.recorder = SimpleNamespace(settings=SimpleNamespace(failures=failures), metrics={})

    async def generate():
        made = worker(function, **options)
        return DataProto.concat([await made.generate_sequences(chunk) for chunk in batch.chunk(chunks)])

    with patch.dict(_agent_loop_registry, mine={"_target_": f"{__name__}.Loop"}):
        output = asyncio.run(generate())
    if not validate:
        spread_infos(output, validate=False)
        return output
    manager._leave_out_failed(output)
    failed = [info for info in output.non_tensor_batch[REWARD_INFO] if "sample_error" in info]
    assert manager.recorder.metrics == {"failures/validation_samples": len(failed)}
    return output


def flaky(*failures):
    """A reward function that first does what ``failures`` say: raise an error, or give a value; then 1 for each."""
    left = list(failures)

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if left and ground_truth == 0:
            first = left.pop(0)
            if isinstance(first, Exception):
                raise first
            return first
        return {"score": 1.0, "acc": 1.0}

    return compute_score


BROKEN = [OSError("no disk"), math.nan, math.inf, None, "1", [1.0], {"acc": 1.0}, {"score": 1e39}, 10**400]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("validate", [False, True])
def test_reward_that_fails_is_scored_again_without_the_agent_loop(broken, validate):
    output = generated(flaky(broken), rows(2, 3), validate=validate)
    assert Loop.runs == 2, "one run a sample"
    assert output.batch["rm_scores"].sum(-1).tolist() == [1.0, 1.0]
    assert output.batch["response_mask"].sum(-1).tolist() == [2, 3]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda value: repr(value)[:20])
def test_reward_that_keeps_failing_is_left_out_of_a_validation_and_named(broken, capsys):
    output = generated(flaky(*[broken] * 3), rows(2, 3), validate=True)
    lost, kept = output.batch["rm_scores"].sum(-1).tolist()
    assert kept == 1.0 and math.isnan(lost)
    assert "prompt uid0" in output.non_tensor_batch["sample_error"][0]
    said = "warning: 1 of the 2 samples of a validation count in no mean; one of them: RewardError"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("broken", BROKEN, ids=lambda value: repr(value)[:20])
def test_reward_that_keeps_failing_ends_nopr_by_its_prompt(broken):
    with pytest.raises(RewardError, match="prompt uid0"):
        generated(flaky(*[broken] * 3), rows(2, 3))


def test_reward_that_raises_is_named_with_the_users_file_and_line_in_a_validation():
    with pytest.raises(RolloutFailedError, match=rf"RewardError: .*no disk \({__file__}:\d+\)"):
        generated(flaky(*[OSError("no disk")] * 3), rows(2, 3), validate=True, most=0.25)


@pytest.mark.parametrize("error", [OSError("no sandbox"), asyncio.CancelledError("no sandbox")], ids=repr)
@pytest.mark.parametrize("validate", [False, True])
def test_loop_that_raises_is_run_again(validate, error, monkeypatch):
    monkeypatch.setattr(Loop, "error", error)
    monkeypatch.setattr(Loop, "fails", (1,))
    output = generated(flaky(), rows(2, 3), validate=validate)
    assert Loop.runs == 3 and output.batch["response_mask"].sum(-1).tolist() == [2, 3]


def test_loop_that_keeps_raising_is_left_out_of_a_validation_and_ends_nopr(monkeypatch):
    monkeypatch.setattr(Loop, "fails", range(99))
    output = generated(flaky(), rows(2, 3), validate=True, sample_retries=1)
    assert Loop.runs == 3 and output.batch["response_mask"].sum(-1).tolist() == [0, 3]
    lost, kept = output.batch["rm_scores"].sum(-1).tolist()
    assert kept == 1.0 and math.isnan(lost)
    said = output.non_tensor_batch["sample_error"][0]
    assert re.fullmatch(r"OSError: no sandbox \(.*test_failing_samples\.py:\d+\)", said), "the user's line"
    with pytest.raises(OSError, match="no sandbox"):
        generated(flaky(), rows(2, 3), sample_retries=1)
    assert Loop.runs == 3


@pytest.mark.parametrize("dead", [False, True])
def test_request_that_a_replica_refuses_costs_its_sample_and_a_dead_replica_ends_the_run(monkeypatch, dead):
    """A conversation that fills the model's context leaves no room for an answer."""
    error = ReplicaError("vLLM replica r0 refused request 7: ValueError: no room", dead=dead)
    monkeypatch.setattr(Loop, "error", error)
    monkeypatch.setattr(Loop, "fails", range(99))
    for validate in (False, True):
        if dead or not validate:
            with pytest.raises(ReplicaError, match="no room"):
                generated(flaky(), rows(2, 3), validate=validate, sample_retries=1)
        else:
            output = generated(flaky(), rows(2, 3), validate=validate, sample_retries=1)
            assert output.batch["response_mask"].sum(-1).tolist() == [0, 3]
            assert "ValueError: no room" in output.non_tensor_batch["sample_error"][0]
        assert Loop.runs == (1 if dead else 3) + (1 if dead else 0)


def test_loop_that_cannot_be_made_is_left_out_of_a_validation(monkeypatch):
    monkeypatch.setattr(Loop, "fails", ("made",))
    output = generated(flaky(), rows(2, 3), validate=True, sample_retries=0)
    assert output.batch["response_mask"].sum().item() == 0


def test_too_many_samples_without_a_score_end_the_run_by_one_of_them():
    with pytest.raises(RolloutFailedError, match=r"1 of the 2 samples of a validation failed .*0\.25.*prompt uid0"):
        generated(flaky(*[math.nan] * 3), rows(2, 3), validate=True, most=0.25)
    with pytest.raises(RewardError, match="prompt uid0 is nan"):
        generated(flaky(math.nan), rows(2, 3), validate=True, sample_retries=None)


def test_sample_longer_than_its_batch_is_left_out_of_a_validation_and_ends_nopr(capsys):
    output = generated(flaky(), rows(R + 1, 3), validate=True)
    assert output.batch["response_mask"].sum(-1).tolist() == [0, 3]
    assert output.batch["responses"].shape == (2, R)
    words = r"agent loop mine returned a response of 9 tokens (actor_rollout_ref.rollout.response_length=8)"
    assert words in output.non_tensor_batch["sample_error"][0] and words in capsys.readouterr().out
    with pytest.raises(OverlongError, match=re.escape(words)):
        generated(flaky(), rows(R + 1, 3))


def sparse(data_source, solution_str, ground_truth, extra_info):
    return [{"score": 1.0, "acc": 1.0}, {"score": 0.0, "acc": 0.0, "pred": None}, {"score": 1.0, "pred": 12}][
        ground_truth
    ]


def test_workers_whose_samples_have_different_keys_make_one_batch():
    output = generated(sparse, rows(2, 2, 2), chunks=3)
    assert output.meta_info["reward_extra_keys"] == ["score", "acc", "pred"]
    assert output.non_tensor_batch["acc"].tolist() == [1.0, 0.0, None]
    assert output.non_tensor_batch["pred"].tolist() == [None, None, 12]


@pytest.mark.parametrize("name", ["temperature", "returns", "responses"])
def test_reward_and_loop_may_say_what_is_named_like_something_of_the_trainers(monkeypatch, name):
    """verl's update asserts that no two of a batch have a name."""
    run = Loop.run

    async def leaves(self, sampling_params, **row):
        output = await run(self, sampling_params, **row)
        output.extra_fields[name] = [0.5]
        return output

    monkeypatch.setattr(Loop, "run", leaves)
    output = generated(lambda **given: {"score": 1.0, name: 0.7}, rows(2, 3))
    output.meta_info["temperature"], output.batch["returns"] = 1.0, torch.zeros(2, R)
    del output.meta_info["metrics"]
    output.to_tensordict()
    assert output.non_tensor_batch[f"reward_{name}"].tolist() == [0.7, 0.7]
    assert output.non_tensor_batch[f"loop_{name}"].tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("info", ["late", ["late"], 3])
def test_reward_manager_that_says_no_dictionary_beside_its_score_costs_its_sample(monkeypatch, info):
    """Of a manager of the user's own; the batch broke on it under noPR."""

    async def run_single(self, data):
        score = data[0].non_tensor_batch["reward_model"]["ground_truth"]
        return {"reward_score": float(score), "reward_extra_info": {"acc": 1.0} if score else info}

    monkeypatch.setattr(NaiveRewardManager, "run_single", run_single)
    output = generated(None, rows(2, 3), validate=True)
    assert output.batch["response_mask"].sum(-1).tolist() == [0, 3]
    assert f"prompt uid0 returned extra information {info!r}: expected" in output.non_tensor_batch["sample_error"][0]


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
    trainer = object.__new__(kind)
    outputs = iter(batches)
    rollout = {"val_kwargs": SimpleNamespace(n=1, do_sample=False), "agent": SimpleNamespace(num_workers=1)}
    written = []
    vars(trainer).update(
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(**rollout)),
            trainer=SimpleNamespace(log_val_generations=0, get=lambda key, default=None: str(tmp_path)),
        ),
        val_dataloader=[
            {
                "dummy": torch.zeros(len(each), 1),
                "uid": each.non_tensor_batch.get("uid", np.arange(len(each)) + id(each)),
            }
            for each in batches
        ],
        tokenizer=byte_tokenizer("", pad_token="<pad>", eos_token="<eos>"),
        async_rollout_manager=SimpleNamespace(generate_sequences=lambda prompts: next(outputs)),
        use_rm=False,
        global_steps=1,
        proximal=SimpleNamespace(from_update=False),
    )
    monkeypatch.setattr(verls, "_dump_generations", lambda self, *args: written.append(args[4]))
    return super(TrainerRun, trainer)._validate(), written[0]


def test_validation_averages_numbers_over_batches_whose_samples_have_different_keys(monkeypatch, tmp_path, trainers):
    def mixed(data_source, solution_str, ground_truth, extra_info):
        return [
            {"score": 1.0, "depth": 3, "pred": 12},
            {"score": 0.0, "depth": None, "pred": "none"},
            {"score": 1.0, "steps": [1, 2]},
            math.nan,
        ][ground_truth]

    whole = rows(2, 2, 2, 2)
    batches = [generated(mixed, whole[i : i + 2], validate=True) for i in (0, 2)]
    metrics, written = validated(monkeypatch, tmp_path, trainers, *batches)
    assert metrics["val-core/unknown/reward/mean@1"] == pytest.approx(2 / 3), "without the one that has no score"
    assert metrics["val-aux/unknown/depth/mean@1"] == 3.0
    assert not [name for name in metrics if "pred" in name or "steps" in name]
    assert written["pred"] == [12, "none", None, None] and written["steps"] == [None, None, [1, 2], None]
    assert "prompt uid3" in written["sample_error"][3]


def test_reward_that_writes_into_its_extra_info_changes_no_other_samples_score():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        extra_info["seen"] = seen = extra_info.get("seen", 0) + 1
        extra_info["list"].append(1)
        return float(seen == 1 and len(extra_info["list"]) == 1)

    shared = {"list": []}
    output = generated(compute_score, rows(2, 2, 2, extra_info=[shared] * 3))
    assert output.batch["rm_scores"].sum(-1).tolist() == [1.0] * 3 and shared == {"list": []}


# -- a reward model that shares its devices with the engines: the batch is scored once they sleep ----------------------


class BatchWorker:
    """A handle of verl's reward worker with ``function``."""

    def __init__(self, function):
        async def compute_score_batch(data):
            return await reward_worker(function).compute_score_batch(data)

        self.compute_score_batch = SimpleNamespace(remote=compute_score_batch)


def colocated(monkeypatch, function, batch, *, reward_s=5.0):
    """``batch`` as verl's trainer goes on with it, scored by one worker with ``function``."""

    async def gathered(calls):
        return await asyncio.gather(*calls)

    monkeypatch.setattr(reward_loop.ray, "get", lambda calls: asyncio.run(gathered(calls)))
    trainer = object.__new__(PartialRolloutRayPPOTrainer)
    deadlines = SimpleNamespace(reward_s=reward_s)
    trainer.settings = SimpleNamespace(deadlines=deadlines)
    trainer.reward_loop_manager = manager = object.__new__(RewardLoopManager)
    manager.reward_loop_workers, manager.reward_manager_cls = [BatchWorker(function)], NaiveRewardManager
    manager.reward_model_manager = None
    return batch.union(trainer._compute_reward_colocate(batch))


def unscored(batch, *, validate=False):
    """What the rollout makes of ``batch``, which is scored later."""
    return generated(None, batch, validate=validate, handles=None)


def test_colocated_model_scores_a_batch_on_its_generated_tokens(monkeypatch):
    batch = unscored(rows(2, 3))
    batch.batch["response_mask"][1, 1:] = 0
    output = colocated(monkeypatch, lambda **_: {"score": 1.0, "acc": 0.5}, batch)
    assert output.batch["rm_scores"].nonzero().tolist() == [[0, 1], [1, 0]]
    _, infos = extract_reward(output)
    assert {key: list(column) for key, column in infos.items()} == {"score": [1.0, 1.0], "acc": [0.5, 0.5]}


def test_colocated_score_that_is_no_finite_number_ends_the_run_by_name(monkeypatch):
    with pytest.raises(RewardError, match="colocated reward model gave a score that is no finite number"):
        colocated(monkeypatch, lambda **_: math.nan, unscored(rows(2)))


def test_colocated_model_that_hangs_is_named_with_its_deadline(monkeypatch):
    def slow(**_):
        time.sleep(3.0)

    with pytest.raises(TimeoutError, match=r"scores of the colocated reward model took more than 1 s .*\.reward_s"):
        colocated(monkeypatch, slow, unscored(rows(2, 2)), reward_s=0.5)


def test_validation_with_a_colocated_model_leaves_out_a_failed_sample(monkeypatch, tmp_path, trainers):
    """One sample is too long for its batch."""

    def by_truth(data_source, solution_str, ground_truth, extra_info):
        return {"score": float(ground_truth == 1), "depth": 3}

    output = colocated(monkeypatch, by_truth, unscored(rows(R + 1, 2, 2), validate=True))
    metrics, written = validated(monkeypatch, tmp_path, trainers, output)
    assert metrics["val-core/t/reward/mean@1"] == 0.5
    assert "a response of 9 tokens" in written["sample_error"][0]


def test_workers_whose_samples_are_all_too_long_make_one_batch_with_the_others_of_a_colocated_model():
    batch = generated(None, rows(R + 1, 2), validate=True, chunks=2, handles=None)
    assert "rm_scores" not in batch.batch and len(batch) == 2


# -- what else is read of a reward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("acc", [None, "yes"])
def test_reward_without_what_dynamic_sampling_asks_for_is_a_reward_that_failed(monkeypatch, acc):
    monkeypatch.setattr(ObservedAgentLoopWorker, "_filter", FilterSettings("acc"))
    lacks = {"score": 1.0, "acc": acc}
    words = "prompt uid0: algorithm.filter_groups.metric=acc: the reward function gives"
    with pytest.raises(RewardError, match=words):
        generated(flaky(*[lacks] * 3), rows(2))
    assert generated(flaky(lacks), rows(2)).non_tensor_batch["acc"].tolist() == [1.0]
    assert not generated(flaky(lacks), rows(2), validate=True).batch["rm_scores"].isnan().any()


@pytest.mark.parametrize("part", [None, math.nan, "yes"])
def test_reward_without_a_part_that_gdpo_trains_on_is_a_reward_that_failed(monkeypatch, part):
    monkeypatch.setattr(ObservedAgentLoopWorker, "_parts", ("form",))
    whole = {"score": 1.0, "form": 0.5}
    words = r"form \(algorithm\.gdpo_reward_keys\) in the reward of prompt uid0 is"
    with pytest.raises(RewardError, match=words):
        generated(flaky(*[{"score": 1.0, "form": part}] * 3, whole), rows(2))
    assert generated(flaky({"score": 1.0, "form": part}, whole), rows(2)).non_tensor_batch["form"].tolist() == [0.5]
    assert not generated(flaky({"score": 1.0, "form": part}), rows(2), validate=True).batch["rm_scores"].isnan().any()
