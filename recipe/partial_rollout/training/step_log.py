"""Extends verl's log of a step: overview metrics, a printed line, warnings, pictures; and a run's last lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import groupby
from math import isfinite, nan
from numbers import Real
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from recipe.partial_rollout.config.settings import PartialRolloutConfig, lora_rank
from recipe.partial_rollout.records.metrics import HELD_OUT, KL, length_sigmas, overview
from recipe.partial_rollout.records.run_log import Round
from recipe.partial_rollout.terminal import bars, say
from recipe.partial_rollout.training.trackers import SWANLAB, addresses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from verl.protocol import DataProto

FILTER = "partial_rollout/filter"
"""what the metrics of dynamic sampling start with"""
PICTURES = "1_pictures"
"""section of the pictures"""
PICTURES_EVERY = 10
"""steps from one pair of pictures (timeline of the round, response lengths) to the next"""
_FACTOR, _FLOOR, _FIRST = 10.0, 0.002, 5
"""``PolicyDrift`` warns above _FACTOR times the median of earlier steps and above _FLOOR nats, after _FIRST steps"""
_MISMATCH = 0.1
"""``mismatch`` warns above so many nats a token; single steps of stable runs reached .008 (docs/learning.md)"""
_WATCHED = ("actor/", "critic/", "rollout_corr/")
"""prefixes of verl's metrics (losses, gradients, rewards, advantages, divergences) that ``not_finite`` checks"""

SAMPLE = "sample.txt"
"""file of the run directory with the sample that step 1 shows"""
_SHOWN = 800
"""characters of a sample's prompt, and of the beginning and the end of its response"""

MOST_CALLS = 2000
"""calls that a timeline draws at most; of more it draws every second, third, ..."""
_ENDED, _INTERRUPTED = "#0072B2", "#D55E00"


class StepLog:
    """Logs the steps of one run, under PR or noPR.

    Args:
        config: the whole configuration.
        total_steps: steps of the training.
    """

    def __init__(self, config: DictConfig, settings: PartialRolloutConfig, total_steps: int) -> None:
        self._config, self._settings, self._total = config, settings, total_steps
        self._drift = PolicyDrift()
        self._sample = ""
        """text of the sample that step 1 shows (``sample_text``); "" in a run that resumes"""
        self._discarded = 0
        """groups that dynamic sampling has discarded since step 1, those before a resume included"""
        self._warned = False
        """whether discarded groups of different scores were warned of"""
        self._bar: tqdm | None = None
        """progress of the training; None before this process logs its first step"""

    def show(self, batch: DataProto, step: int, tokenizer: Any) -> None:
        """Show a sample of the batch of step 1: in the terminal, in a file, and in SwanLab with the first pictures."""
        if step == 1:
            self._sample = sample_text(batch, tokenizer)
            (Path(self._config.trainer.default_local_dir) / SAMPLE).write_text(self._sample, encoding="utf-8")
            say(self._sample)

    def extend(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the metrics of ``step`` with the overview's; print the line and any warnings."""
        # First, because a dashboard shows keys in the order in which they come.
        data = {**overview(data, partial=self._settings.enable), **data}
        if self._bar is None:
            self._bar = self._begin(step)
        say(step_line(data, step, self._total, self._settings))
        self._bar.update(step - self._bar.n)
        # The manager counts over all processes of the run; a step without its metric keeps the last one.
        self._discarded = int(data.get(f"{FILTER}/groups_total", self._discarded))
        warnings = [not_finite(data, step), mismatch(data, step), self._scores_differ(data, step)]
        if self._settings.enable:
            warnings.append(self._drift.observe(data, step))
        for warning in filter(None, warnings):
            say(warning)
        return data

    def _begin(self, step: int) -> tqdm:
        """Say where the trackers, which verl has just opened, show the run; return the progress bar of the training."""
        for line in addresses(self._config.trainer.logger):
            say(line)
        # Above it the lines of the steps, below it that of the round (``guard.watch_round``). None: only on a terminal.
        return tqdm(
            total=self._total, initial=max(0, step - 1), desc="training", leave=False, disable=None, file=bars()
        )

    def _scores_differ(self, data: Mapping[str, Any], step: int) -> str | None:
        """A warning, once, if dynamic sampling discards groups of different scores."""
        groups, filters = data.get(f"{FILTER}/scores_differ"), self._settings.group_filter
        if not groups or filters is None or self._warned:
            return None
        self._warned = True
        return (
            f"warning: in step {step} dynamic sampling discarded {groups:.0f} groups whose samples have the same "
            f"{filters.metric} and different scores. To compare the scores, set "
            f"algorithm.filter_groups.metric=seq_final_reward. Keep {filters.metric} if they differ only by a term that "
            f"should not decide, such as DAPO's penalty on length"
        )

    def data_ended(self, step: int) -> str:
        """A line that says why the training ends after ``step``."""
        taken = discarded(self._discarded, step * self._settings.batch_groups, self._settings)
        return (
            f"the training ends after step {step} of {self._total}, because the data has no more prompts "
            f"(trainer.total_epochs={self._config.trainer.total_epochs}): dynamic sampling {taken}"
        )

    def end(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def close(self, step: int, round_: Round | None) -> None:
        """Send pictures of ``round_`` to SwanLab, every ``PICTURES_EVERY`` steps from step 1 on.

        Call it after verl has logged ``step``. If ``round_`` is not that step's round, nothing is sent.
        """
        due = SWANLAB in self._config.trainer.logger and (step - 1) % PICTURES_EVERY == 0
        if due and round_ is not None and round_.step == step:
            # It need not be installed, and takes a second to import.
            import swanlab

            pictures = {"timeline": timeline(round_), "lengths": length_histogram(round_)}
            sent: dict[str, Any] = {f"{PICTURES}/{name}": swanlab.Image(each) for name, each in pictures.items()}
            if step == 1:
                sent[f"{PICTURES}/sample"] = swanlab.Text(self._sample)
            swanlab.log(sent, step=step)


def step_line(data: Mapping[str, Any], step: int, total: int, settings: PartialRolloutConfig) -> str:
    """Format a step's main metrics as a line; the file and the trackers have all of them.

    Args:
        data: metrics of the step. If they are of a validation alone, the line has only its scores.
        total: steps of the training.
    """
    scores = [f"{key.split('/', 1)[1]} {value:.3f}" for key, value in data.items() if HELD_OUT.fullmatch(key)]
    held_out = f"validation {'  '.join(scores)}"
    if "training/global_step" not in data:
        return f"step {step:>3} | {held_out}"

    def get(key: str) -> float:
        return float(data.get(key, nan))

    rollout, whole = get("timing_s/gen"), get("timing_s/step")
    parts = [
        f"step {step:>3}/{total}",
        f"reward {get('critic/score/mean'):.3f}",
        f"length {get('response_length/mean'):.0f}",
        f"{whole:.1f} s = {'wait' if settings.separate else 'rollout'} {rollout:.1f} + train {whole - rollout:.1f}",
        f"{get('partial_rollout/rollout/tokens_per_s'):,.0f} tok/s",
    ]
    if "partial_rollout/staleness/mean" in data:
        stale, most = get("partial_rollout/staleness/mean"), get("partial_rollout/staleness/max")
        parts.append(f"stale {stale:.2f} (max {most:.0f})")
        parts.append(f"carried {get('partial_rollout/buffer/carried_groups'):.0f}")
    if f"{FILTER}/groups" in data:
        parts.append(discarded(int(get(f"{FILTER}/groups")), settings.batch_groups, settings))
    if scores:
        parts.append(held_out)
    return " | ".join(parts)


def discarded(groups: int, trained: int, settings: PartialRolloutConfig) -> str:
    """Return, as text, how many groups dynamic sampling has discarded, of these and the ``trained`` ones."""
    metric = settings.group_filter and settings.group_filter.metric
    return f"discarded {groups:,} of {groups + trained:,} groups (equal {metric})"


def last_lines(config: DictConfig, step: int) -> str:
    """Return the lines of a run that has ended after ``step``: its directory, and the commands that come next."""
    run_dir, tools = Path(config.trainer.default_local_dir), "python -m recipe.partial_rollout.tools"
    weights, backend = run_dir / f"global_step_{step}" / "actor", config.actor_rollout_ref.actor.strategy
    merge = f"python -m verl.model_merger merge --backend {'megatron' if backend == 'megatron' else 'fsdp'}"
    commands = {
        f"{tools} report {quote(str(run_dir))}": True,
        f"{tools} audit {quote(str(run_dir))}": config.partial_rollout.enable,
        f"{merge} --local_dir {quote(str(weights))} --target_dir {quote(str(run_dir / 'model'))}": weights.is_dir()
        # Of adapters it makes the base model.
        and not lora_rank(config),
    }
    next_ones = [command for command, applies in commands.items() if applies]
    return "\n  ".join([f"finished after step {step}: the run is in {run_dir}. Next:", *next_ones])


# -- a sample ----------------------------------------------------------------------------------------------------------


def sample_text(batch: DataProto, tokenizer: Any) -> str:
    """Return the first sample of ``batch`` as text: end of the prompt, beginning and end of the response, reward.

    Masked tokens, such as a tool's text, are enclosed in ``[masked]`` and ``[/masked]``.
    """
    data, width = batch.batch, batch.batch["prompts"].shape[1]
    whole = data["attention_mask"][0].bool()
    prompt = tokenizer.decode(data["prompts"][0][whole[:width]].tolist())
    # An image is a thousand times the same token.
    prompt = re.sub(r"(<\|\w+\|>)\1+", r"\1", prompt)
    response, mask = (data[name][0][whole[width:]].tolist() for name in ("responses", "response_mask"))
    text = ""
    for trained, run in groupby(zip(response, mask, strict=True), key=lambda token: token[1] > 0):
        part = tokenizer.decode([token for token, _ in run])
        text += part if trained else f"[masked]{part}[/masked]"
    if len(text) > 2 * _SHOWN:
        text = f"{text[:_SHOWN]}\n...\n{text[-_SHOWN:]}"
    scores = data.get("rm_scores", None)
    return (
        f"-- one sample of step 1: the end of its prompt\n{prompt[-_SHOWN:]}\n"
        f"-- its response: {len(response):,} tokens, {sum(mask):,} of them trained\n"
        f"{text}\n-- its reward: {'not known yet' if scores is None else f'{scores[0].sum():g}'}\n"
    )


# -- warnings of collapse ----------------------------------------------------------------------------------------------


def not_finite(data: Mapping[str, Any], step: int) -> str | None:
    """Return a warning that names the metrics of ``step`` that are nan or infinite; None if all are finite."""
    watched = ((key, value) for key, value in data.items() if key.startswith(_WATCHED) and isinstance(value, Real))
    broken = [f"{key} {value}" for key, value in watched if not isfinite(value)]
    if not broken:
        return None
    return (
        f"warning: step {step} has metrics that are not finite: {', '.join(broken)}. FSDP skips an update whose gradient "
        f"is not finite; Megatron applies it, which spoils the weights. Look at the rewards and log-probs of this batch. "
        f"If it recurs, resume an earlier checkpoint"
    )


def mismatch(data: Mapping[str, Any], step: int) -> str | None:
    """Return a warning if engine and trainer disagree in step 1, whose samples are all of the weights that they share."""
    kl = float(data.get(KL, nan))
    if step != 1 or not kl > _MISMATCH:
        return None
    return (
        f"warning: engine and trainer give the samples of step 1 different log-probs ({KL} {kl:.2g}), though their weights "
        "are the same: they do not compute the same model. Compare what only one of them gets, such as "
        "actor_rollout_ref.model.override_config and actor_rollout_ref.rollout.engine_kwargs, and try "
        "actor_rollout_ref.model.use_remove_padding=False"
    )


class PolicyDrift:
    """Compares each step's ``rollout_corr/k3_kl`` with those before it (docs/learning.md has the limits' origin)."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._alarmed = False

    def observe(self, data: Mapping[str, Any], step: int) -> str | None:
        """Return a warning if drift begins in ``step``; None if all is well or drift goes on."""
        kl = float(data.get(KL, nan))
        if not isfinite(kl):
            return None
        # Of earlier steps alone: a jump must not lift the median that it is compared with.
        usual = median(self._seen) if len(self._seen) >= _FIRST else None
        self._seen.append(kl)
        before, self._alarmed = self._alarmed, usual is not None and kl > max(_FLOOR, _FACTOR * usual)
        if not self._alarmed or before:
            return None
        return (
            f"warning: at step {step} the policy has drifted far from the one that made its samples ({KL} {kl:.4f}, "
            f"median of earlier steps {usual:.5f}): its reward is likely to fall. Resume from an earlier checkpoint "
            "with actor_rollout_ref.actor.optim.lr_scheduler_type=cosine (Megatron: lr_decay_style) or a lower "
            "partial_rollout.overlap; FSDP keeps a checkpoint's rate, so a lower optim.lr has no effect"
        )


# -- pictures of a round -----------------------------------------------------------------------------------------------


def timeline(round_: Round) -> Figure:
    """Draw each engine call as a line, by replica and start.

    Under separate placement the round is the time since the batch before, and the calls are those that ended in it.
    """
    phase = round_.phase
    calls = sorted(phase.calls, key=lambda call: (str(call.replica), call.start))
    calls = calls[:: -(-len(calls) // MOST_CALLS)] if calls else []
    figure, axes = _empty()
    spans = np.array([(call.busy_from, call.end) for call in calls]).reshape(-1, 2) - phase.start
    cut = np.array([call.interrupted for call in calls], dtype=bool)
    for chosen, colour, label in ((~cut, _ENDED, "ended"), (cut, _INTERRUPTED, "interrupted, resumes later")):
        axes.hlines(np.flatnonzero(chosen), *spans[chosen].T, colors=colour, linewidths=0.8, label=label)
    # Under separate placement calls begin before the batch before: they are cut off there.
    axes.set(xlim=(0, max(phase.seconds, 1e-3)), ylim=(-1, len(calls) + 1), xlabel="seconds of the round")
    axes.set_ylabel("engine calls, by replica and start")
    axes.set_title(f"step {round_.step}: {len(phase.calls)} calls, {phase.decoded_tokens:,} tokens", loc="left")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def length_histogram(round_: Round) -> Figure:
    """Draw a histogram of the trained response lengths (tokens), with a line at the mean.

    The title has the standard deviations of the lengths in the batch and within a group.
    """
    lengths = np.array([length for group in round_.trained for length in group.lengths])
    figure, axes = _empty()
    axes.hist(lengths, bins=40, color=_ENDED)
    axes.axvline(float(lengths.mean()), color="black", linestyle="--", linewidth=1.2)
    axes.set(xlabel="response tokens", ylabel="trained samples")
    batch, group = length_sigmas([group.lengths for group in round_.trained])
    axes.set_title(
        f"step {round_.step}: {len(lengths)} samples, mean {lengths.mean():,.0f}, longest {lengths.max():,}, "
        f"sigma {batch:,.0f} in the batch, {group:,.0f} in a group",
        loc="left",
        fontsize=10,
    )
    return figure


def _empty() -> tuple[Figure, Axes]:
    # A backend of the user's that matplotlib does not know would end the run.
    os.environ["MPLBACKEND"] = "agg"
    # Drawing libraries take a second to import.
    from matplotlib.figure import Figure

    # Fixed margins: a layout that fits itself draws everything twice.
    figure = Figure(figsize=(9.0, 4.0), dpi=90)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.91, bottom=0.14)
    return figure, figure.subplots()
