"""An account of the rollout phases that verl runs itself: noPR's batches, and validation in both arms."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from verl.protocol import DataProto

from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.trained_group import TrainedGroup, prompt_identity
from recipe.partial_rollout.rollout import metrics
from recipe.partial_rollout.rollout.engine_probe import EngineProbe, TakeCalls
from recipe.partial_rollout.rollout.rollout_context import RolloutContext
from recipe.partial_rollout.rollout.round_watch import RoundWatch

_IDENTITY = ("raw_prompt", "index")


class ObservedPhases:
    """Notes the cost of each phase.

    Args:
        context: parts of the trainer.
        take_calls: collects the engine calls of the agent-loop workers.
        probe: measures how fast the engines decode when kept full.
    """

    def __init__(self, context: RolloutContext, take_calls: TakeCalls, probe: EngineProbe) -> None:
        self._context = context
        self._take_calls = take_calls
        self.probe = probe
        self._watch = RoundWatch(context.settings, context.control)
        self._figures: dict[str, float] = {}

    async def validate(self, prompts: DataProto, generated: Awaitable[DataProto]) -> DataProto:
        """Await and return ``generated``, verl's validation of ``prompts``.

        Raises:
            StopTraining: the user asked for it.
        """
        start = time.time()
        output = await self._context.stop.unless_stopped(generated)
        end = time.time()
        await self._take_calls()
        self._context.trace.phase("validate", prompts.meta_info.get("global_steps", 0), start, end)
        return output

    async def batch(self, prompts: DataProto, generated: Awaitable[DataProto]) -> DataProto:
        """As ``validate``, for a batch that is trained."""
        start = time.time()
        output = await self._watch.during(prompts.meta_info["global_steps"], generated)
        end = time.time()
        calls = await self._take_calls()
        phase = RolloutPhase(start, end, calls)
        self._figures = {**self._note(phase, prompts, output), **await self._context.engine_metrics()}
        self._context.reckon_slots(phase.calls)
        return output

    def take_step_metrics(self) -> dict[str, float]:
        """Metrics of the last batch, without the ``partial_rollout/`` prefix."""
        taken, self._figures = self._figures, {}
        return taken

    def _note(self, phase: RolloutPhase, prompts: DataProto, output: DataProto) -> dict[str, Any]:
        """Note a phase of noPR, in which every sample started and ended, under one version."""
        settings = self._context.settings
        step = prompts.meta_info["global_steps"]
        lengths = output.batch["attention_mask"][:, output.batch["prompts"].shape[1] :].sum(dim=1).tolist()
        tokens = output.batch["response_mask"].sum(dim=1).tolist()
        size, n = settings.batch_groups, settings.samples_per_group
        epoch_groups = self._context.steps_per_epoch * size
        trained = []
        for i in range(size):
            order = (step - 1) * size + i
            rows = slice(i * n, (i + 1) * n)
            trained.append(
                TrainedGroup(
                    order=order,
                    epoch=order // epoch_groups,
                    lengths=lengths[rows],
                    staleness=[0] * n,
                    prompt=prompt_identity({key: prompts.non_tensor_batch[key][i * n] for key in _IDENTITY}),
                    segments=[1] * n,
                    tokens=sum(tokens[rows]),
                )
            )
        self._context.trace.round(Round(step, step - 1, phase, trained))
        return {
            **metrics.phase_metrics(phase, self._context.full_concurrency, self.probe.full_tokens_per_s),
            "trained/groups": size,
            "trained/samples": len(lengths),
            "trained/tokens": sum(tokens),
            "lost_samples": 0,
        }
