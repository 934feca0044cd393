"""Reward calls: so many at once, on whichever of verl's reward workers lives, each within its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayActorError, RayTaskError

from recipe.partial_rollout.manager.policies import finite
from recipe.partial_rollout.waits import AGAIN_S, means_death, one_line, result_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 5.0
"""seconds that a reward worker has to show that its event loop runs"""
REWARD_INFO = "reward_extra_info"
"""verl's name for what a reward says beside the score"""
_TRAINERS = {
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_log_probs",
    "rollout_versions", "rm_scores", "token_level_scores", "token_level_rewards", "old_log_probs", "entropys",
    "ref_log_prob", "values", "advantages", "returns", "rollout_is_weights", "reward_baselines", "sum_pi_squared",
    "global_token_num", "images_seqlens", "temperature", "multi_turn",
}  # fmt: skip
"""column names of verl's trainer: its update asserts that no other column of a batch has one of them"""


def reward_places(config: Any) -> int | None:
    """Return how many reward calls each agent-loop worker may make at once under the whole ``config``; None: any number.

    Workers share the cores of all nodes: verl spreads its reward workers over them, and each call goes to any of them.
    """
    given = config.partial_rollout.reward_concurrency
    if given is not None or config.reward.reward_model.enable or config.reward.sandbox_fusion.url:
        return given
    # Ray's count of a node may be above what is there (``ray_init.num_cpus``), or below it (a container's quota).
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cores = sum(min(count, len(os.sched_getaffinity(0))) for count in nodes)
    return max(1, cores // config.actor_rollout_ref.rollout.agent.num_workers)


def paces_rewards(config: Any) -> bool:
    """Whether verl's reward manager queues the calls itself and gives each a deadline of its own, ``reward.timeout``.

    A call would spend ``deadlines.reward_s`` in the manager's queue, which may be as long as its limits make it.
    """
    return OmegaConf.select(config, "reward.reward_manager.name") == "rate_limited"


class RewardError(RuntimeError):
    """The reward function failed, gave no score in time, or none that can be trained."""

    times = 1
    """in a row, for the same output"""


class RewardWorkersLostError(RuntimeError):
    """No reward worker answers any more, which ends the run."""


class _AwayError(Exception):
    """A reward worker has died, or Ray cannot reach it."""


async def reward_of(call: Awaitable[T], prompt: Any, deadline_s: float | None = None) -> T:
    """Return the result of ``call``, of a reward function.

    Raises:
        RewardError: it failed, or took more than ``deadline_s``; names ``prompt``.
        RewardWorkersLostError: see ``RewardWorkers``.
    """
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await call
    except RewardWorkersLostError:
        raise
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():  # type: ignore[union-attr]
            raise
        why = f"failed on prompt {prompt}: {one_line(error)}"
        if limit.expired():
            why = f"gave no score for prompt {prompt} within {deadline_s:g} s (partial_rollout.deadlines.reward_s)"
        raise RewardError(f"reward function {why}") from error


def parts_of_reward(config: Any) -> tuple[str, ...]:
    """Return the keys that each reward must have beside its score: those that GDPO takes its advantages from."""
    algorithm = config.algorithm
    return tuple(algorithm.get("gdpo_reward_keys") or ()) if algorithm.adv_estimator == "gdpo" else ()


def renamed(fields: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Rename those of ``fields``, which ``who`` (a reward or a loop) gives a sample, that have a name of the trainer's own.

    >>> renamed({"acc": 1.0, "temperature": 0.7}, "reward")
    {'acc': 1.0, 'reward_temperature': 0.7}
    """
    return {f"{who}_{name}" if name in _TRAINERS else name: value for name, value in fields.items()}


def checked(score: Any, prompt: Any, info: Mapping[str, Any], parts: Sequence[str] = ()) -> float:
    """Return ``score`` of ``prompt`` as a number.

    Args:
        info: extra information of the reward. parts: keys of it that must have numbers too.

    Raises:
        RewardError: one is no number that can be trained, ``info`` is no dictionary, or the function gave no score.
    """
    if not isinstance(info, Mapping):
        raise RewardError(f"reward for prompt {prompt} returned extra information {info!r:.60}: expected a dictionary")
    # verl's rate_limited manager answers with 0 and exactly this for a function that raised, or was late. What a function
    # itself returns has a "score", or no word of an error.
    if set(info) == {"acc", "timeout"} and info["timeout"] is True:
        raise RewardError(f"reward function gave no score for prompt {prompt} in time (reward.timeout)")
    if set(info) == {"acc", "error"}:
        raise RewardError(f"reward function failed on prompt {prompt}: {info['error']}")
    said = {
        f"reward of prompt {prompt}": score,
        **{f"{key} (algorithm.gdpo_reward_keys) in the reward of prompt {prompt}": info.get(key) for key in parts},
    }
    for what, value in said.items():
        if finite(value) is None:
            raise RewardError(f"{what} is {value!r:.60}, which is no finite number")
    return float(score)


class RewardWorkers:
    """Stands for an actor handle in verl's ``reward_loop_worker_handles``: calls of a worker that is away go to the others.

    verl picks one at random for each sample, also one on a dead node. Here a call whose worker dies is made once more, by
    another one. A worker whose function never returns is ended, because other samples wait behind it. Ray restarts a
    worker that has ended, ``partial_rollout.failures.worker_restarts`` times (``verl_ext.reward_workers``).

    Args:
        handles: verl's reward workers. config: the whole one.
    """

    def __init__(self, handles: Sequence[Any], config: Any) -> None:
        self.compute_score = self
        self._living = list(handles)
        self._config = config
        self._died_of: RayActorError | None = None
        """the first death: a reward file that does not load ends all of them alike"""
        self._doubted: list[Any] = []
        """workers that are asked whether a function holds them"""

    async def remote(self, data: Any) -> dict:
        """Call ``RewardLoopWorker.compute_score`` on a worker that lives; the caller sets the deadline.

        Args:
            data: a ``DataProto``.

        Raises:
            RuntimeError: two workers died in turn during the call: its function may have ended their processes.
            RewardWorkersLostError: all are dead.
        """
        with contextlib.suppress(_AwayError):
            if self._living:
                return await self._ask(random.choice(self._living), data)
        try:
            return await self._ask(await self._first_that_answers(), data)
        except _AwayError as error:
            if not self._living:
                raise self._lost() from self._died_of
            raise RuntimeError(f"two reward workers died in turn during one call: {error}") from error

    async def _ask(self, handle: Any, data: Any) -> dict:
        call = handle.compute_score.remote(data)
        try:
            return await call
        except asyncio.CancelledError:
            # Its place goes to another call: it must not go on there.
            ray.cancel(call)
            await self._end_if_stuck(handle)
            raise
        except RayTaskError:
            # The reward function's own error, which may be about an actor of its own.
            raise
        except RayActorError as error:
            self._note(handle, error)
            raise _AwayError(one_line(error)) from error

    def _note(self, handle: Any, error: BaseException) -> None:
        """Forget the worker if it is dead."""
        if not isinstance(error, RayActorError):
            raise error
        if means_death(error) and handle in self._living:
            self._died_of = self._died_of or error
            self._living.remove(handle)

    async def _first_that_answers(self) -> Any:
        """Return a worker that lives and is not held by its function."""
        while self._living:
            asked = {asyncio.ensure_future(result_of(each.__ray_ready__.remote())): each for each in self._living}
            try:
                answered, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for ready in answered:
                    if (error := ready.exception()) is None:
                        return asked[ready]
                    self._note(asked[ready], error)
            finally:
                for ready in asked:
                    ready.cancel()
            await asyncio.sleep(AGAIN_S)
        raise self._lost() from self._died_of

    def _lost(self) -> RewardWorkersLostError:
        path = self._config.reward.custom_reward_function.path
        restarts = self._config.partial_rollout.failures.worker_restarts
        return RewardWorkersLostError(
            f"no reward worker answers (reward.num_workers): {path or 'a scorer of verl'} does not load, or has ended each "
            f"more than partial_rollout.failures.worker_restarts={restarts} times; the first: {one_line(self._died_of)}"
        )

    async def _end_if_stuck(self, handle: Any) -> None:
        """End the worker of a call that was given up, unless the call ended with that, as a coroutine does."""
        if handle in self._doubted:
            return
        self._doubted.append(handle)
        try:
            stuck = await asyncio.wait_for(result_of(handle.__ray_call__.remote(_runs_in_threads)), _ANSWERS_WITHIN_S)
        except TimeoutError:
            stuck = True
        except RayActorError:
            return
        finally:
            self._doubted.remove(handle)
        if stuck:
            logger.warning("a reward function does not return: its reward worker is ended, and starts anew")
            ray.kill(handle, no_restart=False)


def _runs_in_threads(worker: Any) -> bool:
    """Whether ``worker``'s reward function is synchronous: its thread goes on when the call is cancelled."""
    return not getattr(worker.reward_manager, "is_async_reward_score", False)
