"""verl's agent-loop manager: noPR's with an account of its phases, and PR's, whose batches come from the driver.

PR's finished groups become verl's ``DataProto`` here; padding happens here and nowhere earlier. The batch contract
(B = groups * samples, P = rollout.prompt_length, R = rollout.response_length):

================== ========= ======= ==========================================================================
tensor             shape     dtype   content
================== ========= ======= ==========================================================================
prompts            [B, P]    int64   left-padded
responses          [B, R]    int64   right-padded, generated and tool tokens
response_mask      [B, R]    int64   1 where the model generated the token
input_ids          [B, P+R]  int64   prompts then responses
attention_mask     [B, P+R]  int64   1 where there is a token
position_ids       [B, P+R]  int64   as verl's ``compute_position_id_with_mask``
rollout_log_probs  [B, R]    float32 under the version that sampled each token; 0 elsewhere
rollout_versions   [B, R]    int32   policy version of each generated token; -1 elsewhere
rm_scores          [B, R]    float32 the score at the last generated token (absent when a reward model scores later)
================== ========= ======= ==========================================================================

Non-tensor fields: of the dataset row what it is scored by (all of it, when a reward model scores later), ``uid`` (the
slot's, so that verl's advantage estimators group by it), ``__num_turns__``, ``multi_modal_inputs`` (empty), the reward's
extra information and the agent loop's extra fields.
Rows of a group are adjacent. verl's trainer reads everything but ``rollout_versions``, which is for metrics and losses.
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopMetrics
from verl.protocol import DataProto
from verl.utils.model import compute_position_id_with_mask
from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.manager.actor import ManagerActor, RayObjects
from recipe.partial_rollout.manager.types import SampleOutput, TakenGroup
from recipe.partial_rollout.records.run_log import EngineCall, Phase, RolloutPhase, Round, TrainedGroup, prompt_identity
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.guard import Guard, watch_round
from recipe.partial_rollout.rollout.session import RunSession
from recipe.partial_rollout.rollout.step_book import noted, tell_failed
from recipe.partial_rollout.training.reward_info import info_columns, objects, on_generated_tokens, spread_infos
from recipe.partial_rollout.waits import result_of, wait
from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient
from recipe.partial_rollout.worker.observed import ObservedAgentLoopWorker, ObservedLLMClient
from recipe.partial_rollout.worker.rewards import REWARD_INFO

_LIST_FIELDS = ("turn_scores", "tool_rewards")
_SCORED_BY = ("data_source", "reward_model", "extra_info")
"""what verl's trainer has of the dataset row of a scored sample: other columns may be named like what is its own"""
_IDENTITY = ("raw_prompt", "index")
"""columns by which the report knows a prompt again; a dataset of the user's own may have neither"""


class ObservedAgentLoopManager(AgentLoopManager):
    """noPR: verl's manager and workers make the batches; the cost of each rollout phase is noted.

    verl constructs it before the trainer has all its parts; ``connect`` makes what needs them.
    """

    worker_class: type[ObservedAgentLoopWorker] = ObservedAgentLoopWorker
    client_class: type[ObservedLLMClient] = ObservedLLMClient
    session: RunSession
    on_batch: Callable[[DataProto, int], None] = staticmethod(lambda batch, step: None)
    """called with each batch for training and its step"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        super().__init__(*args, **kwargs)
        self.llm_client = self.client_class.over(self.llm_client)

    def connect(self, session: RunSession, pad_id: int) -> None:
        """Observe the run of ``session``; call it once, after the workers are up.

        Args:
            pad_id: token id of the padding.
        """
        self.session = session

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """``AgentLoopManager.generate_sequences``, observed.

        Raises:
            StopTraining: the user asked for it during a validation.
        """
        if prompts.meta_info.get("validate", False):
            output = await self._validate(prompts, super().generate_sequences(prompts))
            return output
        step, start = prompts.meta_info["global_steps"], time.time()
        showing = watch_round(self.session, step, time.monotonic())
        output = await wait(super().generate_sequences(prompts), None, "the round", None, watches=[showing])
        spread_infos(output, validate=False)
        self.on_batch(output, step)
        phase = RolloutPhase(start, time.time(), await self._take_calls())
        self.session.figures.update(self._note(phase, prompts, output))
        self.session.figures.update(await self.session.engine_metrics())
        self.session.slots.reckon(phase.calls)
        return output

    async def _validate(self, prompts: DataProto, generated: Awaitable[DataProto]) -> DataProto:
        start = time.time()
        output = await wait(generated, None, "validation", None, watches=[self.session.stop.watch()])
        self._leave_out_failed(output)
        end = time.time()
        if not self.session.settings.enable:
            # The next batch's are counted from here; PR's driver knows its own by their names.
            await self._take_calls()
        self.session.log.add(Phase("validate", prompts.meta_info.get("global_steps", 0), start, end))
        return output

    async def _take_calls(self) -> tuple[EngineCall, ...]:
        """The engine calls of all workers that ended since they were last taken."""
        asked = asyncio.gather(*[result_of(worker.take_calls.remote()) for worker in self.agent_loop_workers])
        deadline_s = self.session.settings.deadlines.interrupt_s
        lists = await wait(asked, deadline_s, "asking the agent-loop workers to take_calls", "interrupt_s")
        return tuple(call for calls in lists for call in calls)

    def _leave_out_failed(self, output: DataProto) -> None:
        """Count and name the samples of a validation that failed; no mean counts them.

        Raises:
            RolloutFailedError: they are too many.
        """
        # A colocated reward model scores this batch later.
        output.meta_info["validate"] = True
        spread_infos(output, validate=True)
        errors = [info["sample_error"] for info in output.non_tensor_batch[REWARD_INFO] if "sample_error" in info]
        tell_failed(errors, len(output), self.session.settings.failures.max_masked_fraction, validate=True)
        failed = "failures/validation_samples"
        self.session.figures[failed] = self.session.figures.get(failed, 0) + len(errors)

    def _note(self, phase: RolloutPhase, prompts: DataProto, output: DataProto) -> dict[str, float]:
        """Note a phase of noPR, in which every sample started and ended, under one version."""
        settings = self.session.settings
        step = prompts.meta_info["global_steps"]
        lengths = output.batch["attention_mask"][:, output.batch["prompts"].shape[1] :].sum(dim=1).tolist()
        tokens = output.batch["response_mask"].sum(dim=1).tolist()
        size, n = settings.batch_groups, settings.samples_per_group
        epoch_groups = self.session.steps.per_epoch * size
        columns = prompts.non_tensor_batch
        identity = {key: columns[key] for key in _IDENTITY if key in columns}
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
                    prompt=prompt_identity({key: column[i * n] for key, column in identity.items()}),
                    segments=[1] * n,
                    tokens=sum(tokens[rows]),
                )
            )
        return noted(self.session, Round(step=step, phase=phase, trained=trained))


class PartialRolloutAgentLoopManager(ObservedAgentLoopManager):
    """PR: the driver's groups fill verl's empty batch slots; validation is verl's own, observed."""

    worker_class = PartialRolloutAgentLoopWorker
    client_class = PartialRolloutLLMClient

    def connect(self, session: RunSession, pad_id: int) -> None:
        """Start the manager actor, the workers' claim loops and the driver; called once, after the workers are up."""
        settings = session.settings
        self.session, self._pad_id = session, pad_id
        store = RayObjects(settings.deadlines.interrupt_s)
        # With dynamic sampling it is unknown how many prompts the training will consume, only how many it will train.
        bounded = settings.group_filter is not None and settings.drain
        train_groups = session.steps.last * settings.batch_groups if bounded else None
        manager = on_this_node(ray.remote(ManagerActor)).remote(settings, store, train_groups)
        guard = Guard(session, manager, self.agent_loop_workers, self._spawn)
        session.driver = Driver(session, manager, store, guard)
        auto_await(guard.start)()

    def _spawn(self) -> Any:
        """A new worker, made as in verl's ``_init_agent_loop_workers``, but on the driver's node."""
        return on_this_node(self.agent_loop_workers_class).remote(  # type: ignore[attr-defined]
            self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        )

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Validation: verl's own. Training: the driver's next batch; row i belongs to slot i // rollout.n."""
        if prompts.meta_info.get("validate", False):
            output = await super().generate_sequences(prompts)
            return output
        step = int(prompts.meta_info["global_steps"])
        groups = await self.session.driver.next_batch(step)
        rollout = self.config.actor_rollout_ref.rollout
        uids = prompts.non_tensor_batch["uid"][:: rollout.n]
        batch = assemble_batch(groups, uids, rollout.prompt_length, rollout.response_length, self._pad_id)
        self.on_batch(batch, step)
        outputs = [output for group in groups for output in group.outputs]
        metrics = [AgentLoopMetrics.model_validate(output.metrics).model_dump() for output in outputs]
        batch.meta_info["timing"] = self._performance_metrics([metrics], batch)
        return batch


def on_this_node(actor_class: Any) -> Any:
    """The Ray actor class ``actor_class`` on the driver's node, whose death ends the run in any case.

    Left to itself, Ray may place an actor on a node that has died without its notice, which comes some 15 s late. No CPU is
    asked for: all of this node's may be taken, and the actor would wait for one.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return actor_class.options(num_cpus=0, scheduling_strategy=here)


# -- the batch -----------------------------------------------------------------------------------------------------------


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
    groups: Sequence[TakenGroup], slot_uids: Sequence[str], *, scored: bool
) -> tuple[dict[str, np.ndarray], list[str]]:
    rows = [group.row for group in groups for _ in group.outputs]
    outputs = [output for group in groups for output in group.outputs]
    infos = info_columns([output.reward_extra_info for output in outputs])
    # A reward model that scores the batch may write into a sample's row, which is its own.
    kept = [key for key in groups[0].row if key in _SCORED_BY or not scored]
    fields = {key: objects([deepcopy(row[key]) for row in rows]) for key in kept}
    loop_keys = {key for output in outputs for key in output.extra_fields} | set(_LIST_FIELDS)
    fields.update({key: objects([o.extra_fields.get(key) for o in outputs]) for key in sorted(loop_keys, key=str)})
    fields.update(infos)
    fields["uid"] = objects([uid for uid, group in zip(slot_uids, groups, strict=True) for _ in group.outputs])
    fields["__num_turns__"] = np.array([o.num_turns for o in outputs], dtype=np.int32)
    fields["multi_modal_inputs"] = objects([{} for _ in outputs])
    return fields, list(infos)


def _fitted(outputs: Sequence[SampleOutput], response_length: int) -> tuple[SampleOutput, ...]:
    """``outputs`` of a group as the batch holds them: masked ones with a sibling's prompt, cut to the width.

    The turns of a sample that failed may have made more tokens than a response holds.
    """
    prompt = next((output.prompt_ids for output in outputs if not output.masked), np.zeros(1, np.int32))
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
    """The training batch of ``groups``, in their order.

    Args:
        slot_uids: one per group, as verl's ``fit`` named its slots.
        prompt_length: P, tokens. response_length: R, tokens. pad_id: token id of the padding.

    Raises:
        RuntimeError: a group lacks an output.
    """
    sizes = {len(group.outputs) for group in groups}
    if len(sizes) != 1:
        raise RuntimeError(f"groups of a batch have {sorted(sizes)} outputs; all must have rollout.n")
    groups = [replace(g, outputs=_fitted(g.outputs, response_length)) for g in groups]
    outputs = [output for group in groups for output in group.outputs]
    tensors = _tensors(outputs, prompt_length, response_length, pad_id)
    scored = "rm_scores" in tensors.keys()  # noqa: SIM118
    non_tensors, extra_keys = _non_tensors(groups, slot_uids, scored=scored)
    meta = {"reward_extra_keys": extra_keys} if scored else {}
    return DataProto(batch=tensors, non_tensor_batch=non_tensors, meta_info=meta)
