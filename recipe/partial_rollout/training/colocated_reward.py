"""Scores of a reward model that shares its devices with the engines: of a whole batch at once, while the engines sleep.

verl's ``RewardLoopManager.compute_rm_score`` takes the first sample's keys for all and waits for ever, and one reward that
raises ends the run. Here rewards fail as they do in the agent-loop workers: each alone, asked for again, masked, named.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
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

Score = Callable[[int], Coroutine[Any, Any, tuple[float, dict[str, Any]]]]
"""scores a row of the batch"""
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
    workers, parts = RewardWorkers(manager.reward_loop_workers, manager.config), parts_of_reward(manager.config)
    prompts = batch.non_tensor_batch.get("uid", range(len(batch)))

    async def score(row: int) -> tuple[float, dict[str, Any]]:
        async def said() -> tuple[Any, dict[str, Any]]:
            result = await workers.remote(batch.slice(row, row + 1))
            return result["reward_score"], dict(result.get("reward_extra_info") or {})

        given, info = await reward_of(said(), prompts[row])
        return checked(given, prompts[row], info, () if validate else parts), info

    errors = list(batch.non_tensor_batch.get("sample_error", [None] * len(batch)))
    rows = [row for row, error in enumerate(errors) if error is None]
    asking = partial(_scores, score, rows, prompts, settings)
    scored, failed = finished(_awake(manager.reward_model_manager, asking, settings.deadlines.interrupt_s))
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


async def _scores(
    score: Score, rows: list[int], prompts: Sequence[Any], settings: PartialRolloutConfig
) -> tuple[Scored, dict[int, RewardError]]:
    """Scores of ``rows``, and why the others have none."""
    scored: Scored = {}
    for times in itertools.count(1):
        failed = await _attempt(score, rows, prompts, settings.deadlines.reward_s, scored)
        verdict = verdict_on(times, settings.failures)
        if not failed or verdict is FailureVerdict.MASK:
            break
        if verdict is FailureVerdict.RAISE:
            raise next(iter(failed.values()))
        logger.warning("%s; asked again, with %d others of its batch", next(iter(failed.values())), len(failed) - 1)
        await asyncio.sleep(retry_delay_s(times))
        rows = list(failed)
    return scored, failed


async def _attempt(
    score: Score, rows: list[int], prompts: Sequence[Any], deadline_s: float, scored: Scored
) -> dict[int, RewardError]:
    """Ask for all ``rows`` at once; verl's workers queue them, so the deadline starts with each answer anew."""
    failed: dict[int, RewardError] = {}
    limit = asyncio.timeout(deadline_s)

    async def ask(row: int) -> None:
        try:
            scored[row] = await score(row)
        except RewardError as error:
            failed[row] = error
        limit.reschedule(asyncio.get_running_loop().time() + deadline_s)

    try:
        async with limit:
            # What is given up ends its worker if that is stuck, which is waited for.
            ended = await asyncio.gather(*map(ask, rows), return_exceptions=True)
        for error in filter(None, ended):
            raise error
    except TimeoutError:
        late = [row for row in rows if row not in scored and row not in failed]
        error = RewardError(
            f"reward function gave no score for {len(late)} samples, one of prompt {prompts[late[0]]}, within "
            f"{deadline_s:g} s of the last (partial_rollout.deadlines.reward_s)"
        )
        failed |= dict.fromkeys(late, error)
    return failed
