"""verl's agent-loop manager for PR and noPR. noPR's also records its rounds; PR's takes its batches from the driver.

PR's finished groups become verl's ``DataProto`` here; padding happens here and nowhere earlier. A sample has one row, or as
many as its agent loop returned outputs (v1). The batch contract, with B = number of rows, P = rollout.prompt_length and
R = rollout.response_length:

================== ========= ======= ==========================================================================
tensor             shape     dtype   content
================== ========= ======= ==========================================================================
prompts            [B, P]    int64   left-padded
responses          [B, R]    int64   right-padded, generated and tool tokens
response_mask      [B, R]    int64   1 where the model generated the token
input_ids          [B, P+R]  int64   prompts then responses
attention_mask     [B, P+R]  int64   1 where there is a token
position_ids       [B, P+R]  int64   as verl's ``compute_position_id_with_mask``; of a vision model: [B, 4, P+R]
rollout_log_probs  [B, R]    float32 under the version that sampled each token; 0 elsewhere
rollout_versions   [B, R]    int32   policy version of each generated token; -1 elsewhere
rm_scores          [B, R]    float32 the score at the last generated token (absent when a reward model scores later)
================== ========= ======= ==========================================================================

Non-tensor fields: the columns of the dataset row that score a sample (all columns, when a reward model scores later),
``uid`` (of verl's placeholder, equal for the samples of a group: verl's advantage estimators group by it),
``__num_turns__``, ``multi_modal_inputs`` (a row's images as ``batch_images`` prepares them; empty without images), the
reward's extra information, the agent loop's extra fields, and, if a sample has several rows, ``__row__`` (the row's
number in its sample, from 0). Rows of a group, and those of a sample, are adjacent. verl's trainer reads all fields
except ``rollout_versions``, which is for metrics and losses, and ``__row__``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopMetrics
from verl.protocol import DataProto
from verl.utils.model import compute_position_id_with_mask
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.checkpoint.row_images import opened_row
from recipe.partial_rollout.manager.policies import SAMPLE_ERROR
from recipe.partial_rollout.manager.types import SampleOutput, TakenGroup
from recipe.partial_rollout.records.run_log import EngineCall, Phase, RolloutPhase, Round, TrainedGroup, prompt_identity
from recipe.partial_rollout.rollout.driver import on_this_node
from recipe.partial_rollout.rollout.guard import watch_round
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.rollout.recorder import Recorder, report_failed
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.training.batch_images import add_images
from recipe.partial_rollout.training.reward_info import info_columns, objects, on_generated_tokens, spread_infos
from recipe.partial_rollout.waits import result_of, wait
from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient
from recipe.partial_rollout.worker.loop_rows import ROW
from recipe.partial_rollout.worker.observed import ObservedAgentLoopWorker, ObservedLLMClient
from recipe.partial_rollout.worker.pictures import Pictures

_LIST_FIELDS = ("turn_scores", "tool_rewards")
_SCORED_BY = ("data_source", "reward_model", "extra_info")
"""dataset columns that stay in a batch whose samples have their scores; others could collide with verl's columns"""


class ObservedAgentLoopManager(AgentLoopManager):
    """noPR: verl's manager and workers make the batches, and each round is recorded.

    verl constructs this manager before the trainer has a recorder and the other parts of the run. ``connect`` sets
    them.
    """

    worker_class: type[ObservedAgentLoopWorker] = ObservedAgentLoopWorker
    client_class: type[ObservedLLMClient] = ObservedLLMClient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Before verl's constructor, which takes its own class where none is set.
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        super().__init__(*args, **kwargs)
        self.llm_client = self.client_class.over(self.llm_client)

    def connect(
        self,
        recorder: Recorder,
        steps: TrainingSteps,
        stop: StopSignals,
        on_batch: Callable[[DataProto, int], None],
        pad_id: int,
        driver: Any,
        pictures: Pictures | None = None,
    ) -> None:
        """Connect the parts of the run. Call it once, after the workers are up.

        Args:
            recorder: records rounds and validations.
            steps: the steps of the training.
            stop: the signals that end a validation.
            on_batch: called with each training batch and its step.
            pad_id: token id of the padding.
            driver: PR's ``Driver``, which gives the batches; None under noPR.
            pictures: for a model that takes images; None for any other, and under noPR.
        """
        self.recorder, self._steps, self._stop = recorder, steps, stop
        self.on_batch, self._pad_id, self._driver, self._pictures = on_batch, pad_id, driver, pictures

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Have verl generate, and record the round or the validation.

        Raises:
            StopTraining: the user asked for it during a validation.
        """
        if prompts.meta_info.get("validate", False):
            return await self._validate(prompts, super().generate_sequences(prompts))
        step, start = prompts.meta_info["global_steps"], time.time()
        recorder, batch_groups = self.recorder, self.recorder.settings.batch_groups
        showing = watch_round(recorder.control, batch_groups, step, time.monotonic())
        output = await wait(super().generate_sequences(prompts), None, "the round", None, watches=[showing])
        spread_infos(output, validate=False)
        self.on_batch(output, step)
        phase = RolloutPhase(start, time.time(), await self._take_calls())
        recorder.round(self._round(phase, prompts, output))
        await recorder.engines()
        recorder.slots.update(phase.calls)
        return output

    async def _validate(self, prompts: DataProto, generated: Awaitable[DataProto]) -> DataProto:
        start = time.time()
        output = await wait(generated, None, "validation", None, watches=[self._stop.watch()])
        self._leave_out_failed(output)
        self.recorder.log.add(Phase("validate", prompts.meta_info.get("global_steps", 0), start, time.time()))
        if not self.recorder.settings.enable:
            # Or the next round would count the calls of this validation. PR's driver knows its own by their names.
            await self._take_calls()
        return output

    async def _take_calls(self) -> tuple[EngineCall, ...]:
        """Return the engine calls that have ended in all workers since this was last called."""
        pending = asyncio.gather(*[result_of(worker.take_calls.remote()) for worker in self.agent_loop_workers])
        deadline_s = self.recorder.settings.deadlines.interrupt_s
        lists = await wait(pending, deadline_s, "asking the agent-loop workers to take_calls", "interrupt_s")
        return tuple(call for calls in lists for call in calls)

    def _leave_out_failed(self, output: DataProto) -> None:
        """Warn of the failed samples of a validation, and add their number to the metrics.

        Their score is nan, which the means of a validation leave out (``reward_info.averaged``).

        Raises:
            RolloutFailedError: more than ``failures.max_masked_fraction`` of the samples failed.
        """
        # A colocated reward model scores this batch later, and must know that it is a validation's.
        output.meta_info["validate"] = True
        spread_infos(output, validate=True)
        errors = [error for error in output.non_tensor_batch[SAMPLE_ERROR] if error]
        report_failed(errors, len(output), self.recorder.settings.failures.max_masked_fraction, validate=True)
        metrics, failed = self.recorder.metrics, "failures/validation_samples"
        metrics[failed] = metrics.get(failed, 0) + len(errors)

    def _round(self, phase: RolloutPhase, prompts: DataProto, output: DataProto) -> Round:
        """Make the record of a round of noPR, in which every sample started and ended under one version."""
        settings = self.recorder.settings
        step = prompts.meta_info["global_steps"]
        samples = samples_of(output)
        response = output.batch["attention_mask"][:, output.batch["prompts"].shape[1] :]
        lengths, tokens = (
            np.bincount(samples, weights=each.sum(dim=1).numpy()).astype(int).tolist()
            for each in (response, output.batch["response_mask"])
        )
        size, n = settings.batch_groups, settings.samples_per_group
        epoch_groups = self._steps.per_epoch * size
        trained = []
        for i in range(size):
            order = (step - 1) * size + i
            rows = slice(i * n, (i + 1) * n)
            trained.append(
                TrainedGroup(
                    uid=f"{order // epoch_groups}/{order % epoch_groups}",
                    order=order,
                    lengths=lengths[rows],
                    staleness=[0] * n,
                    prompt=prompt_identity({key: column[i * n] for key, column in prompts.non_tensor_batch.items()}),
                    segments=[1] * n,
                    tokens=sum(tokens[rows]),
                    more_rows=int(np.isin(samples, range(i * n, (i + 1) * n)).sum()) - n,
                )
            )
        return Round(step=step, phase=phase, trained=trained)


class PartialRolloutAgentLoopManager(ObservedAgentLoopManager):
    """PR: the driver's groups take the place of verl's placeholders. Validation runs as under noPR."""

    worker_class = PartialRolloutAgentLoopWorker
    client_class = PartialRolloutLLMClient

    def spawn(self) -> Any:
        """Make a worker as verl's ``_init_agent_loop_workers`` does, but on the driver's node."""
        return on_this_node(self.agent_loop_workers_class).remote(  # type: ignore[attr-defined]
            self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        )

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Return verl's validation, or the driver's next batch: sample i belongs to placeholder i // rollout.n."""
        if prompts.meta_info.get("validate", False):
            return await super().generate_sequences(prompts)
        step = int(prompts.meta_info["global_steps"])
        groups = await self._driver.next_batch(step)
        rollout = self.config.actor_rollout_ref.rollout
        uids = prompts.non_tensor_batch["uid"][:: rollout.n]
        batch = assemble_batch(groups, uids, rollout.prompt_length, rollout.response_length, self._pad_id)
        if self._pictures is not None:
            await add_images(batch, groups, self._pictures)
        self.on_batch(batch, step)
        timings = [AgentLoopMetrics.model_validate(row.metrics).model_dump() for group in groups for row in group.rows]
        batch.meta_info["timing"] = self._performance_metrics([timings], batch)
        return batch


# -- the batch -----------------------------------------------------------------------------------------------------------


def samples_of(batch: DataProto) -> np.ndarray:
    """int [B]: for each row of ``batch`` the number of its sample, from 0. A sample may have several rows.

    >>> samples_of(DataProto.from_single_dict({ROW: np.array([0, 1, 0, 0, 1, 2])})).tolist()
    [0, 0, 1, 2, 2, 2]
    """
    rows = batch.non_tensor_batch.get(ROW)
    return np.arange(len(batch)) if rows is None else np.cumsum(rows == 0) - 1


def _padded(rows: Sequence[np.ndarray], where: torch.Tensor, fill: float, dtype: torch.dtype) -> torch.Tensor:
    """[B, width]: each row where ``where`` [B, width] is true, ``fill`` elsewhere."""
    result = torch.full(where.shape, fill, dtype=dtype)
    result[where] = torch.from_numpy(np.concatenate(rows)).to(dtype)
    return result


def _tensors(outputs: Sequence[SampleOutput], prompt_length: int, response_length: int, pad_id: int) -> TensorDict:
    sizes = torch.tensor([(len(o.prompt_ids), o.response_length) for o in outputs])
    in_prompt = torch.arange(prompt_length, 0, -1) <= sizes[:, :1]
    in_response = torch.arange(response_length) < sizes[:, 1:]
    prompts = _padded([o.prompt_ids for o in outputs], in_prompt, pad_id, torch.int64)
    responses = _padded([o.response_ids for o in outputs], in_response, pad_id, torch.int64)
    attention_mask = torch.cat([in_prompt, in_response], dim=1).long()
    fields = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": _padded([o.response_mask for o in outputs], in_response, 0, torch.int64),
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": compute_position_id_with_mask(attention_mask),
        "rollout_log_probs": _padded([o.log_probs for o in outputs], in_response, 0, torch.float32),
        "rollout_versions": _padded([o.versions for o in outputs], in_response, -1, torch.int32),
    }
    if all(o.masked or o.reward_score is not None for o in outputs):
        rm_scores = torch.zeros(len(outputs), response_length)
        last = torch.tensor([max(o.response_length, 1) - 1 for o in outputs])
        scores = torch.tensor([o.reward_score or 0.0 for o in outputs], dtype=torch.float32)
        rm_scores[torch.arange(len(outputs)), last] = scores
        fields["rm_scores"] = on_generated_tokens(rm_scores, fields["response_mask"])
    return TensorDict(fields, batch_size=len(outputs))


def _non_tensors(
    samples: Sequence[tuple[str, dict[str, Any], SampleOutput]], *, scored: bool
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the non-tensor columns of ``samples``, and the names of those that come from the rewards.

    Args:
        samples: (uid, dataset row, output) of each row of the batch.
        scored: whether every row has its score; otherwise all columns of the dataset are kept.
    """
    uids, rows, outputs = zip(*samples, strict=True)
    infos = info_columns([output.reward_extra_info for output in outputs])
    # A reward model that scores the batch may write into a sample's row, which is its own.
    kept = [key for key in rows[0] if key in _SCORED_BY or not scored]
    own = [opened_row(deepcopy({key: row[key] for key in kept})) for row in rows]
    fields = {key: objects([row[key] for row in own]) for key in kept}
    loop_keys = {key for output in outputs for key in output.extra_fields} | set(_LIST_FIELDS)
    fields.update({key: objects([o.extra_fields.get(key) for o in outputs]) for key in sorted(loop_keys, key=str)})
    fields.update(infos)
    fields["uid"] = objects(uids)
    fields["__num_turns__"] = np.array([o.num_turns for o in outputs], dtype=np.int32)
    fields["multi_modal_inputs"] = objects([{} for _ in outputs])
    return fields, list(infos)


def _fitted(outputs: Sequence[SampleOutput], response_length: int) -> tuple[SampleOutput, ...]:
    """Give masked ``outputs`` of a group a sibling's prompt, and cut their responses to ``response_length`` tokens.

    A failed sample may have more tokens than a response holds. A sibling's prompt with images is not used, because it
    has tokens of images whose pixels the masked sample lacks. If no sibling's prompt can be used, the prompt is one
    token 0.
    """
    prompts = (output.prompt_ids for output in outputs if not (output.masked or output.images))
    prompt = next(prompts, np.zeros(1, np.int32))
    parts = ("response_ids", "response_mask", "log_probs", "versions")
    return tuple(
        replace(output, prompt_ids=prompt, **{part: getattr(output, part)[:response_length] for part in parts})
        if output.masked
        else output
        for output in outputs
    )


def assemble_batch(
    groups: Sequence[TakenGroup], slot_uids: Sequence[str], prompt_length: int, response_length: int, pad_id: int
) -> DataProto:
    """Make the training batch of ``groups``, in their order.

    Args:
        slot_uids: one per group, the uids that verl's ``fit`` gave its placeholders.
        prompt_length: P, tokens. response_length: R, tokens. pad_id: token id of the padding.
    """
    samples = [
        (uid, group.row, output)
        for uid, group in zip(slot_uids, groups, strict=True)
        for output in _fitted(group.outputs, response_length)
    ]
    rows = [(uid, row, each) for uid, row, output in samples for each in output.rows]
    tensors = _tensors([output for _, _, output in rows], prompt_length, response_length, pad_id)
    scored = "rm_scores" in tensors.keys()  # noqa: SIM118
    non_tensors, extra_keys = _non_tensors(rows, scored=scored)
    if len(rows) > len(samples):
        non_tensors[ROW] = np.concatenate([np.arange(len(output.rows)) for _, _, output in samples])
    meta = {"reward_extra_keys": extra_keys} if scored else {}
    return DataProto(batch=tensors, non_tensor_batch=non_tensors, meta_info=meta)
