"""Reward calls: a limited number at once, each with a deadline, on those of verl's reward workers that are alive."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayTaskError
from verl.experimental.reward_loop.reward_manager.remote import RemoteRewardManager

from recipe.partial_rollout.manager.policies import SAMPLE_ERROR, finite
from recipe.partial_rollout.waits import AGAIN_S, InfraError, is_cancelled, means_death, one_line, result_of
from verl_ext.contained import THREADED, contained

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 5.0
"""seconds that a reward worker has to show that its event loop runs"""
REWARD_INFO = "reward_extra_info"
"""verl's key for the dictionary that a reward function returns beside the score"""
_TRAINERS = {
    # columns of the batch, its meta information, and columns that metrics read
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_log_probs",
    "rollout_versions", "rm_scores", "token_level_scores", "token_level_rewards", "old_log_probs", "entropys",
    "ref_log_prob", "values", "advantages", "returns", "rollout_is_weights", "reward_baselines", "sum_pi_squared",
    "global_token_num", "images_seqlens", "temperature", "multi_turn", "reward_extra_keys", "dummy_tensor",
    "routed_experts", "teacher_ids", "teacher_logprobs", "multi_modal_inputs", "uid", "data_source", "reward_model",
    "extra_info", "__num_turns__", "__row__", "tool_call_counts",
    # the recipe's mark of a failed sample
    SAMPLE_ERROR,
    # parameters of an engine, which a column would replace
    "use_dynamic_bsz", "sp_size", "force_group_size", "pad_mode", "pad_token_id", "use_remove_padding",
    "use_fused_kernels", "disable_auto_offload", "no_lora_adapter", "enable_routing_replay", "max_response_length",
    "return_model_output", "update_lr_scheduler", "record_r2_routes", "local_cp_size", "forced_max_seqlen",
}  # fmt: skip
"""names that a column of a reward or a loop must not have: it would end verl's update, or change it in silence"""
_WORKERS = {
    "raw_prompt", REWARD_INFO, "spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps",
}  # fmt: skip
"""names of verl's worker and engine, which give a loop's fields some of them"""


def reward_permits(config: Any) -> int | None:
    """Return how many reward calls each agent-loop worker may make at once; None: any number.

    ``reward_concurrency`` is returned if it is set. Otherwise a reward model or a sandbox has no limit. For a reward
    function, the cores of all nodes are divided among the agent-loop workers, because verl spreads its reward workers
    over all nodes.

    Args:
        config: the whole configuration.
    """
    given = config.partial_rollout.reward_concurrency
    if given is not None or config.reward.reward_model.enable or config.reward.sandbox_fusion.url:
        return given
    # Ray's count of a node may be above what is there (``ray_init.num_cpus``), or below it (a container's quota).
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cores = sum(min(count, len(os.sched_getaffinity(0))) for count in nodes)
    return max(1, cores // config.actor_rollout_ref.rollout.agent.num_workers)


class RewardError(RuntimeError):
    """The reward function failed, gave no score in time, or none that can be trained."""

    times = 1
    """failures in a row of the reward of the same output"""


async def reward_of(call: Awaitable[Any], prompt: Any, deadline_s: float | None = None) -> Any:
    """Return the result of ``call``, of a reward function.

    Raises:
        RewardError: it failed, or took more than ``deadline_s``; names ``prompt``.
        InfraError: see ``RewardWorkers``.
    """
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await contained(call)
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, InfraError) or is_cancelled():
            raise
        why = f"failed on prompt {prompt}: {one_line(error)}"
        if limit.expired():
            why = f"gave no score for prompt {prompt} within {deadline_s:g} s (partial_rollout.deadlines.reward_s)"
        raise RewardError(f"reward function {why}") from error


def renamed(fields: Mapping[Any, Any], who: Literal["reward", "loop"]) -> dict[str, Any]:
    """Return ``fields``, which a reward or a loop gave, with text as names and ``who_`` before each name that is taken.

    >>> renamed({"acc": 1.0, "temperature": 0.7, 3: "c"}, "reward")
    {'acc': 1.0, 'reward_temperature': 0.7, '3': 'c'}
    """
    taken = _TRAINERS | _WORKERS if who == "reward" else _TRAINERS
    return {f"{who}_{name}" if name in taken else str(name): value for name, value in fields.items()}


def checked(score: Any, prompt: Any, info: Mapping[str, Any], parts: Sequence[str] = ()) -> float:
    """Return ``score`` of ``prompt`` as a number.

    Args:
        info: extra information of the reward. parts: keys of it that must have numbers too.

    Raises:
        RewardError: one is no number that can be trained, or ``info`` is no dictionary.
    """
    if not isinstance(info, Mapping):
        raise RewardError(f"reward for prompt {prompt} returned extra information {info!r:.60}: expected a dictionary")
    fields = {
        f"reward of prompt {prompt}": score,
        **{f"{key} (algorithm.gdpo_reward_keys) in the reward of prompt {prompt}": info.get(key) for key in parts},
    }
    for what, value in fields.items():
        if finite(value) is None:
            raise RewardError(f"{what} is {value!r:.60}, which is no finite number")
    return float(score)


def gdpo_keys(algorithm: Any) -> Sequence[str]:
    """Return the keys that each reward must have beside its score if GDPO takes its advantages from them."""
    return (algorithm.get("gdpo_reward_keys") or ()) if algorithm["adv_estimator"] == "gdpo" else ()


def check_limited(prompt: Any, info: Mapping[str, Any]) -> None:
    """Check ``info`` of an answer of verl's rate_limited manager.

    Raises:
        RewardError: the function raised or was late. The manager answers with 0 then and exactly these keys; what a
            function returns itself has a "score", or a dictionary of "acc" alone.
    """
    if set(info) == {"acc", "timeout"}:
        raise RewardError(f"reward function gave no score for prompt {prompt} in time (reward.timeout)")
    if set(info) == {"acc", "error"}:
        raise RewardError(f"reward function failed on prompt {prompt}: {info['error']}")


class RewardWorkers:
    """Replaces the actor handles in verl's ``reward_loop_worker_handles``: sends each call to a worker that answers.

    verl chooses a worker at random for each sample, even one on a dead node. Here a call whose worker dies is repeated
    once, on another worker. A worker whose function never returns is killed, because other samples wait behind it. Ray
    restarts a dead worker up to ``partial_rollout.failures.worker_restarts`` times (``verl_ext.reward_workers``).

    Args:
        handles: verl's reward workers. config: the whole config.
    """

    def __init__(self, handles: Sequence[Any], config: Any) -> None:
        self.compute_score = self
        self._living = list(handles)
        self._config = config
        self._died_of: RayActorError | None = None
        """the first death, named when all are dead: a reward file that cannot be loaded kills all for the same reason
        """
        self._doubted: list[Any] = []
        """workers that are being checked for a reward function that does not return"""

    async def remote(self, data: Any) -> dict:
        """Call ``RewardLoopWorker.compute_score`` on a worker that lives; the caller sets the deadline.

        Args:
            data: a ``DataProto``.

        Raises:
            RuntimeError: two workers died in turn during the call: its function may have ended their processes.
            InfraError: all are dead.
        """
        died_of = None
        for _ in range(2):
            handle = await self._one_that_answers()
            call = handle.compute_score.remote(data)
            try:
                return await call
            except asyncio.CancelledError:
                # Another call gets this one's permit, so this one must not go on in the worker.
                ray.cancel(call)
                await self._end_if_stuck(handle)
                raise
            except RayActorError as error:
                # A RayTaskError is the reward function's own error: an actor that it uses may have died.
                if isinstance(error, RayTaskError):
                    raise
                died_of = error
        raise RuntimeError(
            f"two reward workers died in turn during one call, so its reward function may have killed them: "
            f"{one_line(died_of)}"
        ) from died_of

    async def _one_that_answers(self) -> Any:
        """Return a worker that lives and whose event loop is not blocked by its reward function.

        Raises:
            InfraError: all are dead.
        """
        while self._living:
            handle = random.choice(self._living)
            try:
                await asyncio.wait_for(result_of(handle.__ray_ready__.remote()), _ANSWERS_WITHIN_S)
                return handle
            # Its reward function blocks its event loop. It lives and may answer later; another worker may be free now.
            except TimeoutError:
                continue
            except RayActorError as error:
                if means_death(error) and handle in self._living:
                    self._died_of = self._died_of or error
                    self._living.remove(handle)
            # Ray may be restarting it.
            await asyncio.sleep(AGAIN_S)
        reward = self._config.reward
        own = reward.reward_manager.module.path if reward.reward_manager.source == "importlib" else None
        files = " or ".join(filter(None, (reward.custom_reward_function.path, own))) or "a scorer of verl"
        restarts = self._config.partial_rollout.failures.worker_restarts
        raise InfraError(
            f"no reward worker of reward.num_workers is left: {files} cannot be loaded, or each worker died more often "
            f"than partial_rollout.failures.worker_restarts={restarts} allows; the first death: {one_line(self._died_of)}"
        ) from self._died_of

    async def _end_if_stuck(self, handle: Any) -> None:
        """Kill the worker of a cancelled call if its reward function goes on.

        A coroutine ends with the cancellation. A synchronous function may go on in its thread, and a blocked event loop
        does not answer.
        """
        if handle in self._doubted:
            return
        self._doubted.append(handle)
        try:
            # The cancellation reaches the worker before the question.
            await asyncio.sleep(AGAIN_S)
            stuck = await asyncio.wait_for(result_of(handle.__ray_call__.remote(_goes_on)), _ANSWERS_WITHIN_S)
        except TimeoutError:
            stuck = True
        except RayActorError:
            return
        finally:
            self._doubted.remove(handle)
        if stuck:
            logger.warning("a reward function did not return in time: its reward worker is killed, and Ray restarts it")
            ray.kill(handle, no_restart=False)


def _goes_on(worker: Any) -> bool:
    """Return whether a cancelled call of verl's reward ``worker``, in whose process this runs, may go on."""
    # verl's remote manager has its function run in actors, where other calls wait behind it.
    in_actors = isinstance(worker.reward_manager, RemoteRewardManager)
    return in_actors or any(task.done() for task in list(THREADED.values()))
