"""Samples that are too long, or whose loop or reward fails, on verl's own path (noPR and validation)."""

import asyncio
import contextlib
import math
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
from verl.experimental.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.protocol import DataProto

from recipe.partial_rollout.config.settings import FailureLimits, FilterSettings
from recipe.partial_rollout.manager.policies import SAMPLE_ERROR
from recipe.partial_rollout.manager.types import RolloutFailedError
from recipe.partial_rollout.training.agent_loop_manager import ObservedAgentLoopManager
from recipe.partial_rollout.training.reward_info import objects, spread_infos
from recipe.partial_rollout.waits import InfraError
from recipe.partial_rollout.worker.loop_rows import misfit
from recipe.partial_rollout.worker.observed import ObservedAgentLoopWorker
from recipe.partial_rollout.worker.rewards import REWARD_INFO, RewardError
from tests.unit.loop_life import output_of
from tests.unit.shared import byte_tokenizer

P, R = 6, 8


class Loop:
    """Returns a response of as many tokens as its row says; that of the first row ``fails`` so many times before."""

    runs, fails, error = 0, 0, None

    def __init__(self, **_):
        pass

    async def run(self, sampling_params, **row):
        Loop.runs += 1
        if row.get("uid") == "uid0" and Loop.fails:
            Loop.fails -= 1
            raise Loop.error
        return output_of([1, 2, 3], [65] * row["length"], response_logprobs=[-0.5] * row["length"])


def reward_worker(function):
    """verl's, with ``function`` as the user's."""
    made = object.__new__(RewardLoopWorker)
    made.config = SimpleNamespace(reward=SimpleNamespace(custom_reward_function=SimpleNamespace(path="x")))
    made.reward_manager = object.__new__(NaiveRewardManager)
    made.reward_manager.compute_score, made.reward_manager.is_async_reward_score = function, False
    made.reward_manager.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "!" * len(ids))
    made.reward_manager.reward_router_address, made.reward_manager.loop = None, asyncio.get_running_loop()
    return made


def worker(function, *, sample_retries=2, handles=(), parts=(), use_v1=False, corrects=True, processor=None):
    """verl's set-up alone, from its configuration."""
    made = object.__new__(ObservedAgentLoopWorker)
    rollout = {**dict.fromkeys(("temperature", "top_p", "top_k"), 1.0), "prompt_length": P, "response_length": R}
    agent, validation = SimpleNamespace(default_agent_loop="mine"), SimpleNamespace(top_p=1.0, top_k=-1, temperature=0)
    limits = SimpleNamespace(failures=FailureLimits(sample_retries=sample_retries))
    made.config = SimpleNamespace(partial_rollout=limits, data={}, trainer=SimpleNamespace(use_v1=use_v1))
    made.rollout_config = SimpleNamespace(**rollout, agent=agent, val_kwargs=validation, calculate_log_probs=True)
    correction = {"rollout_is": "token"} if corrects else None
    made.config.algorithm = SimpleNamespace(rollout_correction=correction)
    made.tokenizer, made.tools, made.vocabulary = byte_tokenizer("", pad_token="<pad>"), [], 1000
    made._rewards, made._reward_s, made._parts = contextlib.nullcontext(), 5.0, parts
    scoring = None if handles is None else SimpleNamespace(remote=reward_worker(function).compute_score)
    made.reward_loop_worker_handles = scoring and [SimpleNamespace(compute_score=scoring)]
    made.processor = processor
    for name in ("llm_client", "hf_model_type", "dataset_cls", "mm_processor_kwargs"):
        setattr(made, name, None)
    made.distillation_enabled = False
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
    columns = {key: objects(values) for key, values in fields.items()}
    return DataProto(TensorDict({"dummy": torch.zeros(len(lengths), 1)}, len(lengths)), columns)


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
    failed = [error for error in output.non_tensor_batch[SAMPLE_ERROR] if error]
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


class Stops(BaseException):
    """As those of a library in Rust."""


BROKEN = [OSError("no disk"), math.nan, math.inf, None, "1", [1.0], {"acc": 1.0}, {"score": 1e39}, 10**400]
FAILURES = {
    "loop": (OSError("no sandbox"), "OSError: no sandbox"),
    "cancellation": (asyncio.CancelledError("no sandbox"), "CancelledError: no sandbox"),
    "exit": (SystemExit(3), "RuntimeError: SystemExit: 3"),
    "error that is no Exception": (Stops("a"), "RuntimeError: Stops: a"),
    "full context": (RuntimeError("vLLM replica r0 refused request 7: ValueError: no room"), "refused request 7"),
    **{f"reward {value!r:.20}": (value, "RewardError: .*prompt uid0") for value in BROKEN},
}
"""what the agent loop of the first row raises, or its reward gives or raises"""


def outcome(monkeypatch, what, times, **options):
    """What a batch gets of two samples of which the first fails so many times."""
    in_loop = not what.startswith("reward")
    error, _ = FAILURES[what]
    monkeypatch.setattr(Loop, "error", error)
    monkeypatch.setattr(Loop, "fails", times if in_loop else 0)
    return generated(flaky(*[error] * (0 if in_loop else times)), rows(2, 3), **options)


def check_left_out(output, said):
    lost, kept = output.batch["rm_scores"].sum(-1).tolist()
    assert kept == 1.0 and math.isnan(lost) and output.batch["response_mask"].sum(-1).tolist() == [0, 3]
    assert re.search(said, output.non_tensor_batch["sample_error"][0])


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("validate", [False, True])
def test_sample_that_fails_once_is_tried_again(monkeypatch, what, validate):
    output = outcome(monkeypatch, what, 1, validate=validate)
    assert output.batch["rm_scores"].sum(-1).tolist() == [1.0, 1.0]
    assert output.batch["response_mask"].sum(-1).tolist() == [2, 3]
    assert Loop.runs == 2 + (not what.startswith("reward")), "a reward is asked again without its loop"


@pytest.mark.parametrize("what", FAILURES)
def test_sample_that_keeps_failing_is_left_out_or_ends_nopr(monkeypatch, what, capsys):
    said = FAILURES[what][1]
    check_left_out(outcome(monkeypatch, what, 3, validate=True), said)
    assert (
        "warning: 1 of the 2 samples of a validation are left out of the means; one of them: "
        in capsys.readouterr().out
    )
    with pytest.raises((Exception, asyncio.CancelledError)) as ended:
        outcome(monkeypatch, what, 3)
    assert re.search(said, f"{type(ended.value).__name__}: {ended.value}")


def make_loop(**parts):
    return Loop(**parts)


@pytest.mark.parametrize("also", [{}, {"_convert_": "none"}])
def test_agent_loop_may_be_named_by_a_function_that_makes_it(also):
    with patch.dict(_agent_loop_registry, made={"_target_": f"{__name__}.make_loop", **also}):
        output = generated(flaky(), rows(2, 3, agent_name=["made"] * 2))
    assert output.batch["rm_scores"].sum(-1).tolist() == [1.0, 1.0]


def test_task_of_a_loop_that_exits_ends_no_worker(monkeypatch):
    async def exits():
        raise SystemExit(3)

    async def run(self, sampling_params, **row):
        await asyncio.gather(asyncio.sleep(5), exits())

    monkeypatch.setattr(Loop, "run", run)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        generated(flaky(), rows(2, 3))


MISFITS = {
    "a response of 9 tokens (actor_rollout_ref.rollout.response_length=8)": {"response_ids": [65] * (R + 1)},
    "token -100, but the model's tokens are 0 to 999": {"response_ids": [65, -100]},
    "2 tokens with a mask of 1": {"response_mask": [1]},
    "a mask with 5, which is neither 0 nor 1": {"response_mask": [5, 1]},
    "2 tokens with 1 log-probs": {"response_logprobs": [-0.5]},
    "a log-prob that is no number": {"response_logprobs": [-0.5, None]},
    "num_turns=None, which is no integer": {"num_turns": None},
}


@pytest.mark.parametrize("words", MISFITS)
def test_row_that_fits_no_batch_is_left_out_or_ends_nopr(monkeypatch, words):
    async def run(self, sampling_params, **row):
        Loop.runs += 1
        output = output_of([1, 2, 3], [65] * row["length"], response_logprobs=[-0.5] * row["length"])
        return output.model_copy(update=MISFITS[words]) if row["uid"] == "uid0" else output

    monkeypatch.setattr(Loop, "run", run)
    said = re.escape(f"agent loop of prompt uid0 returned {words}")
    check_left_out(generated(flaky(), rows(2, 3), validate=True), said)
    assert Loop.runs == 4, "it is tried again"
    with pytest.raises(ValueError, match=said):
        generated(flaky(), rows(2, 3))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_text_with_the_token_of_an_image_costs_its_sample(monkeypatch, kind):
    """verl makes positions of it, and fails; with a loop that scores itself this ended a validation."""
    sees = SimpleNamespace(get_rope_index=None, image_token_id=62, video_token="<|video_pad|>")
    sees.tokenizer = SimpleNamespace(convert_tokens_to_ids={"<|video_pad|>": 63}.get)
    token = {"image": 62, "video": 63}[kind]
    shown = output_of([1], [65, token], multi_modal_data={f"{kind}s": [object()]})
    for output, media in ((shown, {62, 63}), (output_of([1], [65, token]), set())):
        assert misfit(output, 1000, worker(None, handles=None).rollout_config, media=media) is None
    run = Loop.run

    async def looks(self, sampling_params, **row):
        output = await run(self, sampling_params, **row)
        if row["uid"] == "uid0":
            output.response_ids[-1], output.response_mask[-1], output.reward_score = token, 0, 1.0
        return output

    monkeypatch.setattr(Loop, "run", looks)
    monkeypatch.setattr(ObservedAgentLoopWorker, "_compute_multi_modal_inputs", lambda *_: {})
    monkeypatch.setattr(ObservedAgentLoopWorker, "_compute_position_ids", lambda self, ids, mask, *_: mask)
    output = generated(flaky(), rows(2, 3), validate=True, processor=sees)
    check_left_out(output, f"prompt uid0 returned token {token}, which stands for an image or a video, but shows none")


@pytest.mark.parametrize("validate", [False, True])
def test_sample_of_which_verl_makes_no_row_is_left_out_or_ends_nopr(monkeypatch, validate):
    """As one whose image cannot be read."""
    whole = ObservedAgentLoopWorker._compute_multi_modal_inputs

    def reads(self, output, ids):
        if output.prompt_ids[:1] == [9]:
            raise FileNotFoundError("a.png")
        return whole(self, output, ids)

    run = Loop.run

    async def shows(self, sampling_params, **row):
        output = await run(self, sampling_params, **row)
        if row["uid"] == "uid0":
            output.prompt_ids, output.reward_score = [9, 2, 3], 1.0
        return output

    monkeypatch.setattr(Loop, "run", shows)
    monkeypatch.setattr(ObservedAgentLoopWorker, "_compute_multi_modal_inputs", reads)
    if validate:
        check_left_out(generated(flaky(), rows(2, 3), validate=True), r"FileNotFoundError: a\.png")
    else:
        with pytest.raises(FileNotFoundError, match=r"a\.png"):
            generated(flaky(), rows(2, 3))


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("given", [None, []])
def test_row_without_log_probs_ends_nopr_only_if_a_correction_reads_them(monkeypatch, given, corrects):
    """verl's batch breaks on such a row, or loses the log-probs of all rows, and with them the correction."""

    async def run(self, sampling_params, **row):
        lacks = row["uid"] == "uid0" or not corrects
        return output_of([1, 2, 3], [65] * 2, response_logprobs=given if lacks else [-0.5] * 2)

    monkeypatch.setattr(Loop, "run", run)
    how = {"chunks": 2, "corrects": corrects}
    words = r"prompt uid0 returned 2 tokens without the log-probs that algorithm.rollout_correction reads"
    with pytest.raises(ValueError, match=words) if corrects else contextlib.nullcontext():
        assert "rollout_log_probs" not in generated(flaky(), rows(2, 3), **how).batch
    assert not generated(flaky(), rows(2, 3), validate=True, **how).batch["rm_scores"].isnan().any()


@pytest.mark.parametrize("given", [None, [], [0.0, 0.0]])
def test_row_that_trains_nothing_needs_no_log_probs(monkeypatch, given):
    run = Loop.run

    async def masks(self, sampling_params, **row):
        output = await run(self, sampling_params, **row)
        return output_of([1, 2, 3], [65] * 2, [0, 0], response_logprobs=given) if row["uid"] == "uid0" else output

    monkeypatch.setattr(Loop, "run", masks)
    assert generated(flaky(), rows(2, 3), chunks=2).batch["rollout_log_probs"].sum(-1).tolist() == [0.0, -1.5]


@pytest.mark.parametrize("validate", [False, True])
def test_dead_replica_ends_the_run(monkeypatch, validate):
    monkeypatch.setitem(FAILURES, "dead", (InfraError("vLLM replica r0 failed on request 7"), ""))
    with pytest.raises(InfraError, match="failed on request 7"):
        outcome(monkeypatch, "dead", 1, validate=validate)


def test_too_many_failed_samples_end_the_run_by_the_users_file_and_line():
    said = (
        rf"1 of the 2 samples of a validation used up their retries, .*0\.25.*RewardError: .*no disk \({__file__}:\d+\)"
    )
    with pytest.raises(RolloutFailedError, match=said):
        generated(flaky(*[OSError("no disk")] * 3), rows(2, 3), validate=True, most=0.25)
    with pytest.raises(RewardError, match="prompt uid0 is nan"):
        generated(flaky(math.nan), rows(2, 3), validate=True, sample_retries=None)


def test_field_of_a_reward_or_a_loop_may_have_a_name_of_the_trainers(monkeypatch):
    """verl's update asserts that no two of a batch have a name; an engine takes a column for its parameter."""
    names = "temperature", "returns", "responses", "pad_token_id", "tool_call_counts", "uid", SAMPLE_ERROR
    run = Loop.run

    async def leaves(self, sampling_params, **row):
        output = await run(self, sampling_params, **row)
        output.extra_fields |= {name: [0.5] for name in names}
        return output

    monkeypatch.setattr(Loop, "run", leaves)
    given = {"score": 1.0, True: "no text", **dict.fromkeys((*names, REWARD_INFO), 0.7)}
    output = generated(lambda **_: given, rows(2, 3))
    output.meta_info["temperature"], output.batch["returns"] = 1.0, torch.zeros(2, R)
    del output.meta_info["metrics"]
    output.to_tensordict()
    assert output.non_tensor_batch["True"].tolist() == ["no text"] * 2
    for name in names:
        assert name not in output.non_tensor_batch
        assert output.non_tensor_batch[f"reward_{name}"].tolist() == [0.7, 0.7]
        assert output.non_tensor_batch[f"loop_{name}"].tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("info", ["late", 3])
def test_reward_manager_without_a_dictionary_costs_its_sample(monkeypatch, info):
    """Of a manager of the user's own; the batch broke on it under noPR."""

    async def run_single(self, data):
        score = data[0].non_tensor_batch["reward_model"]["ground_truth"]
        return {"reward_score": float(score), "reward_extra_info": {"acc": 1.0} if score else info}

    monkeypatch.setattr(NaiveRewardManager, "run_single", run_single)
    words = f"prompt uid0 returned extra information {info!r}: expected"
    check_left_out(generated(None, rows(2, 3), validate=True), words)


@pytest.mark.parametrize("odd", ["uid0", "uid1"])
@pytest.mark.parametrize(
    ("change", "validate"), [("field", False), ("field", True), ("no log-probs", True), ("failure", True)]
)
def test_workers_whose_samples_have_different_fields_make_one_batch(monkeypatch, odd, change, validate):
    run = Loop.run

    async def some(self, sampling_params, **row):
        output = await run(self, sampling_params, **row)
        if row["uid"] != odd:
            return output
        if change == "failure":
            raise OSError("no sandbox")
        if change == "no log-probs":
            output.response_logprobs = None
        output.extra_fields["env"] = 3
        return output

    monkeypatch.setattr(Loop, "run", some)
    output = generated(flaky(), rows(2, 3), validate=validate, chunks=2)
    assert ("rollout_log_probs" in output.batch) == (not validate)
    found = output.non_tensor_batch.get("env", objects([None, None])).tolist()
    assert found == [3 if uid == odd and change != "failure" else None for uid in ("uid0", "uid1")]


# -- what else is read of a reward -------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [None, math.nan, "yes"])
@pytest.mark.parametrize(
    ("key", "options", "words"),
    [
        ("acc", {}, "prompt uid0: algorithm.filter_groups.metric=acc: the reward function gives"),
        ("form", {"parts": ("form",)}, r"form \(algorithm\.gdpo_reward_keys\) in the reward of prompt uid0 is"),
    ],
    ids=["dynamic sampling", "gdpo"],
)
def test_reward_without_what_the_algorithm_reads_has_failed(monkeypatch, key, options, words, part):
    if not options:
        monkeypatch.setattr(ObservedAgentLoopWorker, "_filter", FilterSettings("acc"))
    lacks, whole = {"score": 1.0, key: part}, {"score": 1.0, key: 1.0}
    with pytest.raises(RewardError, match=words):
        generated(flaky(*[lacks] * 3, whole), rows(2), **options)
    assert generated(flaky(lacks, whole), rows(2), **options).non_tensor_batch[key].tolist() == [1.0]
    assert not generated(flaky(lacks), rows(2), validate=True, **options).batch["rm_scores"].isnan().any()
