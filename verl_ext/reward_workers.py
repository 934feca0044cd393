"""Patch: all answers of verl's reward workers have the same fields, and a worker that dies is restarted.

- ``compute_score_disrm``, which asks a classifier in a pool of its own, leaves out ``reward_extra_info``, which verl's
  agent-loop workers read from every answer. Here the answer has it, empty.
- ``compute_rm_score``, which scores a batch, makes columns of the keys of the first answer's ``reward_extra_info``, and
  breaks on an answer that lacks one. Here it makes one column, ``reward_extra_info``, of the dictionaries.
- Ray restarts a worker that dies, ``partial_rollout.failures.worker_restarts`` times. One whose function never returns
  can be ended (``ray.kill(..., no_restart=False)``).
- Synchronous reward functions run in threads of Python's default pool, which has four more threads than there are
  cores. A call of a judge would wait for a thread there while its deadline runs. Here every call gets a thread. The
  agent-loop workers limit the number of calls (``partial_rollout.reward_concurrency``).
- A reward function that exits, or a synchronous one that raises StopIteration, fails its call and not its worker
  (``contained``).

It may go when verl's answers have the same fields, its workers restart and outlive such errors, and every call gets a
thread.
"""

import pickle
import zlib
from typing import Any

import ray
from omegaconf import OmegaConf

from verl_ext.contained import contain
from verl_ext.guard import around, replaced

_INFO = "reward_extra_info"


class _Compressed:
    """The config as an argument of an actor. It is pickled compressed, and the actor receives the plain config.

    Ray keeps small arguments in the actor's spec. It may lose larger ones, and then it cannot restart the actor.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _decompressed, (zlib.compress(pickle.dumps(self._config)),)


def _decompressed(packed: bytes) -> Any:
    return pickle.loads(zlib.decompress(packed))


def patch(module: Any) -> None:
    """Give all answers of verl's workers the same fields, and have Ray restart a worker that dies.

    For restarts, ``RewardLoopManager`` starts its workers with ``max_restarts`` and a compressed config.
    """
    worker = module.RewardLoopWorker
    ask_classifier, score_batch = worker.compute_score_disrm, worker.compute_score_batch

    async def compute_score_disrm(self: Any, data: Any) -> dict:
        return {_INFO: {}, **await ask_classifier(self, data)}

    async def compute_score_batch(self: Any, data: Any) -> list[dict]:
        answers = await score_batch(self, data)
        return [{**each, _INFO: {_INFO: each.get(_INFO, {})}} for each in answers]

    # Not by ``around``: Ray looks for coroutine functions, which a decorated one is not.
    worker.compute_score_disrm, worker.compute_score_batch = compute_score_disrm, compute_score_batch

    @around(module.RewardLoopManager, "_init_reward_loop_workers")
    def start_restartable(verls: Any, self: Any) -> None:
        restarts = OmegaConf.select(self.config, "partial_rollout.failures.worker_restarts", default=-1)
        self.reward_loop_workers_class = ray.remote(max_restarts=restarts)(worker)
        with replaced(self, "config", _Compressed(self.config)):
            verls(self)


def widen(module: Any) -> None:
    """Give the event loop of each of verl's reward managers a thread for every call, and contain errors in it."""

    @around(module.RewardManagerBase, "__init__")
    def init(verls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        verls(self, *args, **kwargs)
        contain(self.loop)
