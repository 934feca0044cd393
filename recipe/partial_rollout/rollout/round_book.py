"""Books a finished round: events in the ledger and the trace, and the metrics of its step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tqdm import tqdm

from recipe.partial_rollout.manager.types import FilteredGroup
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.rollout import metrics
from recipe.partial_rollout.rollout.engine_probe import EngineProbe
from recipe.partial_rollout.rollout.rollout_context import RolloutContext
from recipe.partial_rollout.rollout.trained_round import TrainedRound

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.overlap_control import OverlapControl


class RoundBook:
    """Books rounds.

    Args:
        context: parts of the trainer.
        probe: measures how fast the engines decode when kept full.
        overlap: of ``overlap=auto``, learns from each round; None if it is fixed.
    """

    def __init__(self, context: RolloutContext, probe: EngineProbe, overlap: OverlapControl | None) -> None:
        self._context = context
        self._probe = probe
        self._overlap = overlap
        self._spared = 0
        """groups of equal reward that were trained despite dynamic sampling"""

    def resume(self, spared: int) -> None:
        """Continue from a checkpoint whose manager had counted ``spared`` groups."""
        self._spared = spared

    def note(self, played: TrainedRound) -> dict[str, float]:
        """Book a round; returns its metrics, without the ``partial_rollout/`` prefix."""
        context, step, version, groups = self._context, played.step, played.version, played.groups
        assert context.ledger is not None
        context.ledger.admitted(step, version, played.admitted)
        if self._overlap is not None:
            lengths = [[output.response_length for output in group.outputs] for group in groups]
            self._overlap.observe(played.phase.calls, lengths)
        trained = [TrainedGroup.of(group, version) for group in groups]
        figures = {
            **metrics.phase_metrics(
                played.phase,
                context.full_concurrency,
                self._probe.full_tokens_per_s,
                goes_on=context.settings.separate,
            ),
            **metrics.batch_metrics(groups, version),
            **played.gauges,
            **{f"timing/{name}": seconds for name, seconds in played.waits.items()},
            "overlap": played.start.carried_groups / context.settings.batch_groups,
            "admission/admitted": played.start.admitted,
            "failures/replicas_restarted_total": context.control.restarted,
            **(self._overlap.metrics() if self._overlap is not None else {}),
            **self.note_filtered(step, played.filtered, played.gauges),
        }
        context.trace.round(
            Round(
                step=step,
                version=version,
                phase=played.phase,
                trained=trained,
                interrupt_s=played.waits.get("interrupt_s"),
                resume_s=played.waits.get("resume_s"),
                carried_groups=played.start.carried_groups,
                lost_samples=int(played.gauges["lost_samples"]),
            )
        )
        return figures

    def note_filtered(
        self, step: int, filtered: tuple[FilteredGroup, ...], gauges: dict[str, float]
    ) -> dict[str, float]:
        """Book what dynamic sampling did in ``step``; returns metrics: groups filtered, and all groups consumed."""
        group_filter, ledger = self._context.settings.group_filter, self._context.ledger
        if group_filter is None:
            return {}
        assert ledger is not None
        if filtered:
            ledger.filtered(step, step - 1, filtered)
        spared = int(gauges["filter/spared_total"]) - self._spared
        self._spared += spared
        if spared > 0:
            limit = f"algorithm.filter_groups.max_num_gen_batches={group_filter.max_num_gen_batches}"
            tqdm.write(
                f"step {step}: groups of equal {group_filter.metric} that are trained all the same: {spared} "
                f"(past the round's limit, {limit}, or the data ends)"
            )
        return {"filter/groups": len(filtered), "filter/consumed": len(filtered) + self._context.settings.batch_groups}
