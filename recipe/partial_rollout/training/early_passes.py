"""The trainer's forward passes over a batch, run over each group as it becomes ready (``partial_rollout.early_passes``).

Between two updates the weights stand still, and so do the reference's: what a pass gives for a row does not depend on when
it runs. A batch then has only its last groups left to compute.

::

    engines   ==group 1====|==group 2=======|==group 3=================|
    trainer                | pass over 1    | pass over 2 |            | pass over 3 | update
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from recipe.partial_rollout.config.devices import trainer_devices
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training.pass_reader import leaves_pass_out
from recipe.partial_rollout.training.row_results import Forward, RowResults

if TYPE_CHECKING:
    from recipe.partial_rollout.training.ray_trainer import PartialRolloutRayPPOTrainer

OLD, REFERENCE, VALUES = "old_log_prob", "ref_log_prob", "values"
DYNAMIC = {
    OLD: "actor_rollout_ref.actor.use_dynamic_bsz",
    REFERENCE: "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    VALUES: "critic.use_dynamic_bsz",
}
"""verl's key of each pass for micro-batches by tokens, instead of a fixed number of rows"""


def passes_of(config: DictConfig, settings: PartialRolloutConfig) -> list[str]:
    """Names of the passes that a batch needs before its update; ``config`` has been checked."""
    needed = {
        OLD: not leaves_pass_out(config, settings),
        REFERENCE: need_reference_policy(config),
        VALUES: need_critic(config),
    }
    return [name for name, is_needed in needed.items() if is_needed]


class EarlyPasses:
    """Runs passes over rows, and finds their results again once the batch is there.

    Args:
        forwards: the passes, by name.
        unit: a pass takes a multiple of so many rows.
        samples_per_group: rows of a group.
        check_every: steps between two that run ``OLD`` over the whole batch all the same, to compare; 0: never.
    """

    def __init__(self, forwards: dict[str, Forward], unit: int, samples_per_group: int, check_every: int) -> None:
        self.least_groups = unit // gcd(unit, samples_per_group)
        self._forwards = forwards
        self._results = {name: RowResults(forward, unit) for name, forward in forwards.items()}
        self._check_every = check_every
        self._metrics: dict[str, float] = {}

    @classmethod
    def of(cls, trainer: PartialRolloutRayPPOTrainer) -> EarlyPasses | None:
        """Those of ``trainer``, whose workers live; None if they are not asked for."""
        settings, config = trainer.settings, trainer.config
        if not settings.enable or not settings.early_passes:
            return None
        forwards = {name: _forward(trainer, name) for name in passes_of(config, settings)}
        # Actor, reference and critic may be split differently: each has a number of ranks that divides the devices.
        return cls(forwards, trainer_devices(config), settings.samples_per_group, settings.proximal_check_every)

    def __contains__(self, name: str) -> bool:
        return name in self._forwards

    def begin(self) -> None:
        """A batch is awaited: forget what the weights before gave."""
        for results in self._results.values():
            results.forget()

    def run(self, rows: DataProto) -> None:
        """Run all passes over ``rows``."""
        for results in self._results.values():
            results.compute(rows)

    def of_batch(self, name: str, batch: DataProto, step: int) -> DataProto:
        """Results of the pass ``name``; without it among ``forwards``, ``KeyError``. Rows that it lacks are computed."""
        results = self._results[name]
        known = results.known(batch)
        self._metrics |= {"early_passes/share": known / len(batch), "early_passes/unused_rows": results.unused(batch)}
        found = results.of(batch)
        if name == OLD and self._check_every and step % self._check_every == 0:
            self._metrics["early_passes/error"] = self._error(batch, found)
        return found

    def _error(self, batch: DataProto, found: DataProto) -> float:
        """Largest difference to a pass over the whole batch, over the response tokens, nats."""
        results = RowResults(self._forwards[OLD], 1)
        whole = results.of(batch)
        difference = (whole.batch["old_log_probs"] - found.batch["old_log_probs"]).abs()
        return float((difference * batch.batch["response_mask"]).max())

    def take_metrics(self) -> dict[str, float]:
        """Of the last batch, without the ``partial_rollout/`` prefix."""
        taken, self._metrics = self._metrics, {}
        return taken


def _forward(trainer: PartialRolloutRayPPOTrainer, name: str) -> Forward:
    """verl's pass ``name`` as its ``fit`` prepares a batch for it."""
    verls: dict[str, Callable[[Any, DataProto], Any]] = {
        OLD: lambda *args: RayPPOTrainer._compute_old_log_prob(*args)[0],
        REFERENCE: RayPPOTrainer._compute_ref_log_prob,
        VALUES: RayPPOTrainer._compute_values,
    }
    config = trainer.config

    def forward(rows: DataProto) -> DataProto:
        if config.trainer.balance_batch:
            RayPPOTrainer._balance_batch(trainer, rows, metrics={})
        tokens = torch.sum(rows.batch["attention_mask"], dim=-1).tolist()
        temperature = config.actor_rollout_ref.rollout.temperature
        rows.meta_info |= {"temperature": temperature, "global_token_num": tokens, "images_seqlens": []}
        return verls[name](trainer, rows)

    return forward
