"""Scores of a reward model that shares its devices with the engines: of a whole batch at once, while the engines sleep.

verl's ``RewardLoopManager.compute_rm_score`` takes the first sample's keys for all and waits for ever, and one reward that
raises ends the run. Here rewards fail as they do in the agent-loop workers: each alone, asked for again, masked, named.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.policies import FailureVerdict, retry_delay_s, verdict_on
from recipe.partial_rollout.rollout.step_book import tell_failed
from recipe.partial_rollout.training.reward_info import info_columns, objects
from recipe.partial_rollout.waits import finished, one_line, wait
from recipe.partial_rollout.worker.rewards import (
    REWARD_INFO,
    RewardError,
    RewardWorkers,
    checked,
    parts_of_reward,
    reward_of,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

Scored = dict[int, tuple[float, dict[str, Any]]]
"""by row: the score, and what the reward says beside it"""


def score_batch(manager: Any, batch: DataProto, settings: PartialRolloutConfig) -> DataProto:
    """``rm_scores`` [B, R] and the columns of what the rewards say, for verl to add to ``batch``.

    A row that failed in its rollout is not scored. A row without a score gets 0 and is masked in ``batch``; in a validation
    it gets nan, which no mean counts.

    Args:
        manager: verl's ``RewardLoopManager``.

    Raises:
        RolloutFailedError: too many rows have no score.
        RewardError: one has none, and ``failures.sample_retries`` is null.
        RewardWorkersLostError: no reward worker is left.
        NoAnswerError: the reward model does not wake up, or go to sleep again.
    """
    validate = bool(batch.meta_info.get("validate"))
    errors = list(batch.non_tensor_batch.get("sample_error", [None] * len(batch)))
    calls = _Calls(manager, batch, settings, () if validate else parts_of_reward(manager.config))
    rows = [row for row, error in enumerate(errors) if error is None]
    scored, failed = finished(
        _awake(manager.reward_model_manager, lambda: calls.make(rows), settings.deadlines.interrupt_s)
    )
    for row, error in failed.items():
        errors[row] = one_line(error)
    told = [error for error in errors if error is not None]
    tell_failed(told, len(batch), settings.failures.max_masked_fraction, validate=validate)
    nothing = math.nan if validate else 0.0
    scores = [scored[row][0] if row in scored else nothing for row in range(len(batch))]
    infos = [scored[row][1] if row in scored else {} for row in range(len(batch))]
    return _told(batch, manager.reward_manager_cls.assemble_rm_scores(batch, scores), infos, errors, validate)


async def _awake(model: Any, work: Callable[[], Awaitable[T]], deadline_s: float) -> T:
    """``work``'s result, for which the replicas of ``model``, verl's ``RewardModelManager``, are awake."""

    async def have(verb: str) -> None:
        asked = asyncio.gather(*[getattr(replica, verb)() for replica in model.rollout_replicas])
        await wait(asked, deadline_s, f"{verb} of the reward model", "interrupt_s")

    await have("wake_up")
    try:
        return await work()
    finally:
        await have("sleep")


def _told(
    batch: DataProto, scores: torch.Tensor, infos: list[dict], errors: list[str | None], validate: bool
) -> DataProto:
    """What verl adds to ``batch``; its rows with ``errors`` are named there, and masked."""
    columns, found = batch.non_tensor_batch, {}
    for info, error in zip(infos, errors, strict=True):
        info.update({} if error is None else {"sample_error": error})
    if validate:
        # The columns of a validation are made of all its batches (``reward_info.per_sample``).
        columns[REWARD_INFO] = objects([{**old, **new} for old, new in zip(columns[REWARD_INFO], infos, strict=True)])
    else:
        masked = torch.tensor([error is not None for error in errors])
        batch.batch["response_mask"][masked] = 0
        found = {key: column for key, column in info_columns(infos).items() if key not in columns}
    tensors = TensorDict({"rm_scores": scores}, batch_size=len(batch))
    return DataProto(tensors, found, {"reward_extra_keys": [REWARD_INFO] if validate else list(found)})


class _Calls:
    """The calls of verl's reward workers for one batch.

    Args:
        parts: what each reward must have beside its score.
    """

    def __init__(self, manager: Any, batch: DataProto, settings: PartialRolloutConfig, parts: Sequence[str]) -> None:
        self._workers = RewardWorkers(manager.reward_loop_workers, manager.config)
        self._batch = batch
        self._deadline_s = settings.deadlines.reward_s
        self._limits = settings.failures
        self._parts = parts

    async def make(self, rows: list[int]) -> tuple[Scored, dict[int, RewardError]]:
        """Scores of ``rows``, and why the others have none."""
        scored: Scored = {}
        for times in itertools.count(1):
            failed = await self._attempt(rows, scored)
            verdict = verdict_on(times, self._limits)
            if not failed or verdict is FailureVerdict.MASK:
                break
            if verdict is FailureVerdict.RAISE:
                raise next(iter(failed.values()))
            logger.warning("%s; asked again, with %d others of its batch", next(iter(failed.values())), len(failed) - 1)
            await asyncio.sleep(retry_delay_s(times))
            rows = list(failed)
        return scored, failed

    async def _attempt(self, rows: list[int], scored: Scored) -> dict[int, RewardError]:
        """Ask for all ``rows`` at once; verl's workers queue them, so the deadline starts with each answer anew."""
        failed: dict[int, RewardError] = {}
        asked = {asyncio.create_task(self._score(row)): row for row in rows}
        running = set(asked)
        try:
            while running:
                done, running = await asyncio.wait(
                    running, timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    try:
                        scored[asked[task]] = task.result()
                    except RewardError as error:
                        failed[asked[task]] = error
                if not done:
                    prompts = [self._prompt(asked[task]) for task in running]
                    late = RewardError(
                        f"reward function gave no score for {len(prompts)} samples, one of prompt {prompts[0]}, within "
                        f"{self._deadline_s:g} s of the last (partial_rollout.deadlines.reward_s)"
                    )
                    return {**failed, **{asked[task]: late for task in running}}
            return failed
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _prompt(self, row: int) -> Any:
        return self._batch.non_tensor_batch["uid"][row] if "uid" in self._batch.non_tensor_batch else row

    async def _score(self, row: int) -> tuple[float, dict[str, Any]]:
        prompt = self._prompt(row)

        async def said() -> tuple[Any, dict[str, Any]]:
            result = await self._workers.remote(self._batch.slice(row, row + 1))
            return result["reward_score"], dict(result.get("reward_extra_info") or {})

        score, info = await reward_of(said(), prompt)
        return checked(score, prompt, info, self._parts), info
