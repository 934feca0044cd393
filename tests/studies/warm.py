"""``python -m tests.studies.warm``: trainings one after the other, on engines that are started once.

Each line that its stdin, a socket, receives asks for one: ``{"arguments": [...], "directory": "..."}``. ``main_ppo`` runs
with these arguments as in a process of its own. The answer is its exit code, or ``UNFIT`` if it needs other engines.

Kept from run to run: Ray, the processes of trainer and engines, the reward workers. A run equals one in a fresh process:

===================  ===============================================================================================
model and optimizer  made anew by verl's ``init_model`` from the run's path, in a worker object that is new too
engines              hold the trainer's weights before the first sample; ``WarmServer.forget`` is the rest
all else             new objects, and new processes for the manager and the agent-loop workers
===================  ===============================================================================================
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TextIO
from unittest.mock import patch

import cloudpickle
import ray
from omegaconf import DictConfig, OmegaConf
from verl.experimental import reward_loop
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_teacher_policy
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.utils.torch_utils import set_random_seed

from recipe.partial_rollout import main_ppo, task_runner
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import engine_devices
from recipe.partial_rollout.engine import replica
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer
from tests.studies.processes import METRICS, TERMINAL, UNFIT

_OF_A_RUN = ("seed", "n", "val_kwargs", "agent", "trace")
"""keys of ``actor_rollout_ref.rollout`` that no engine is made from"""
_RENEW_S = 120.0
"""for engines to forget the last run, and trainers to drop their model"""


def parts_of(config: DictConfig) -> dict[str, Any]:
    """What the kept parts are made from, of a wired config: two runs share them if this is equal.

    Raises:
        ConfigError: the run has parts that are not made anew.
    """
    model = config.actor_rollout_ref.model
    missing = {
        "devices of their own": engine_devices(config) > 0,
        "critic": need_critic(config),
        "reward model": config.reward.reward_model.enable,
        "teacher": need_teacher_policy(config),
        "LoRA": model.get("lora_rank", 0) > 0 or model.get("lora", {}).get("rank", 0) > 0,
        "Megatron": config.actor_rollout_ref.actor.strategy == "megatron",
    }
    if refused := [name for name, asked in missing.items() if asked]:
        raise ConfigError(f"studies keep engines of runs without {refused[0]} only: remove it from their overrides")
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    files = {path.name: path.read_text() for path in sorted(Path(model.path).glob("*.json"))}
    return {
        "rollout": {key: value for key, value in _plain(rollout).items() if key not in _OF_A_RUN},
        # Models that differ in their weights alone have the same engines.
        "model": {key: value for key, value in _plain(model).items() if key != "path"},
        "files": files or model.path,
        "reference": need_reference_policy(config),
        "devices": (trainer.nnodes, trainer.n_gpus_per_node, trainer.device),
        "ray": _plain(config.ray_kwargs),
        "reward": _plain(config.reward),
    }


def _plain(node: DictConfig) -> dict[str, Any]:
    found: Any = OmegaConf.to_container(node, resolve=True)
    return found


class WarmServer(replica.RecipeVLLMServer):
    """``RecipeVLLMServer`` that another training can use as if it were new."""

    _preempted = 0
    """requests, by the trainings before"""

    async def forget(self, seed: int) -> None:
        """Drop what the last training left: blocks, counters, a closed gate, the state of sampling.

        Raises:
            RuntimeError: requests are left, or hold blocks.
        """
        await self.resume_generation()
        # Kept blocks have salts that the next training's samples have too.
        if self.engine.output_processor.request_states or not await self.engine.reset_prefix_cache():
            raise RuntimeError("the last training has left requests in the engine")
        await vLLMHttpServer.clear_kv_cache(self)
        # vLLM unpickles a method that is bytes, and gives it the worker.
        seeded = cloudpickle.dumps(lambda _worker, to: set_random_seed(to))
        await self.collective_rpc(seeded, args=(seed + self.replica_rank,))
        self._preempted += await self.preemptions() or 0
        self._decoded, self.global_steps = 0, None

    async def preemptions(self) -> int | None:
        count = await super().preemptions()
        return None if count is None else count - self._preempted


class WarmReplica(replica.RecipeVLLMReplica):
    """``RecipeVLLMReplica`` with a ``WarmServer``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(WarmServer)


@dataclass(frozen=True, slots=True)
class Kept:
    """Parts of the first training that the next ones use."""

    made_from: dict[str, Any]
    """``parts_of`` its config"""
    trainers: Any
    """verl's worker group"""
    servers: Any
    """verl's ``LLMServerManager``"""
    rewards: reward_loop.RewardLoopManager

    def renew(self, config: DictConfig) -> None:
        """Make engines and trainers as good as new for a run of ``config``.

        Raises:
            RuntimeError: requests are left in an engine, or it took longer than ``_RENEW_S``.
        """
        self.servers.config = config
        seed = config.actor_rollout_ref.rollout.seed
        servers = [server for each in self.servers.get_replicas() for server in each.servers]
        own = {"config": config.actor_rollout_ref, "distillation_config": config.get("distillation")}
        asked = [server.forget.remote(seed) for server in servers]
        asked += [trainer.__ray_call__.remote(_new_worker, own) for trainer in self.trainers.workers]
        try:
            ray.get(asked, timeout=_RENEW_S)
        except TimeoutError as error:
            raise RuntimeError(
                f"engines and trainers were not as new after {_RENEW_S:g} s: run the study again"
            ) from error


def _new_worker(process: Any, own: dict[str, Any]) -> None:
    """Replace verl's worker in the process of a trainer by a new one; the old model and optimizer are freed."""
    for name in list(process.worker_dict):
        old = process.worker_dict.pop(name)
        kind, role = type(old), old.role
        del old
        gc.collect()
        process.worker_dict[name] = kind(role=role, **own)


class WarmTrainer(PartialRolloutRayPPOTrainer):
    """The recipe's trainer, whose ``init_workers`` finds engines and trainers already there from the second run on."""

    kept: ClassVar[Kept | None] = None

    def init_workers(self) -> None:
        """As the recipe's; ends the run with ``UNFIT`` if what is there is not what it needs."""
        parts, kept, began = parts_of(self.config), WarmTrainer.kept, time.monotonic()
        if kept is None:
            super().init_workers()
            WarmTrainer.kept = Kept(parts, self.actor_rollout_wg, self.llm_server_manager, self.reward_loop_manager)
            return
        if kept.made_from != parts:
            sys.exit(UNFIT)
        kept.renew(self.config)
        group: Any = SimpleNamespace(spawn=lambda prefix_set: dict.fromkeys(prefix_set, kept.trainers))
        self.ray_worker_group_cls = lambda **_: group  # type: ignore[assignment]
        with ExitStack() as patches:
            patches.enter_context(patch.object(LLMServerManager, "create", lambda **_: kept.servers))
            patches.enter_context(patch.object(reward_loop, "RewardLoopManager", lambda **_: kept.rewards))
            super().init_workers()
        print(f"on warm engines after {time.monotonic() - began:.1f} s")

    def fit(self) -> None:
        """As the recipe's; then its agent-loop workers and manager end."""
        super().fit()
        managers = [] if self.driver is None else [self.driver._manager]
        rollout: Any = self.async_rollout_manager
        for actor in (*rollout.agent_loop_workers, *managers):
            ray.kill(actor)


def train(arguments: list[str], directory: Path) -> int:
    """Run ``main_ppo`` with ``arguments``, and its terminal in ``directory``; returns its exit code."""
    with (directory / TERMINAL).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # What a run adds to the environment names its own files.
    with patch.dict(os.environ, VERL_FILE_LOGGER_PATH=str(directory / METRICS)), patch.object(ray, "shutdown"):
        sys.argv = [main_ppo.__file__, *arguments]
        try:
            main_ppo.main()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 1
        finally:
            gc.collect()
            sys.stdout.flush()
    return 0


def serve(asks: TextIO, answers: TextIO) -> None:
    """Train what ``asks`` has, line by line, until it ends."""
    task_runner.PartialRolloutRayPPOTrainer = WarmTrainer
    replica.register = lambda: RolloutReplicaRegistry.register("vllm", lambda: WarmReplica)
    for line in asks:
        ask = json.loads(line)
        print(train(ask["arguments"], Path(ask["directory"])), file=answers, flush=True)


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(0)) as line, open(os.devnull) as nothing:
        # No process that this one starts may hold the line: its end says that this one has ended.
        os.dup2(nothing.fileno(), 0)
        serve(line.makefile(), line.makefile("w"))
