"""One training: its overrides, its process, and its steps as it logs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.partial_rollout.records.metrics import held_out_rewards
from recipe.partial_rollout.tasks.trace_task.prepare import main as prepare
from tests.chaos.victim import kill_session
from tests.gpu.stacks import Sampler

HERE = Path(__file__).parent
ARMS = {"noPR": "nopr", "PR": "pr"}
"""by name in figures: file of ``conf/arm``"""
TERMINAL = "terminal.log"
_POLL_S = 0.5
_ROWS = 512
"""prompts of the trace task"""
_SHOWN = 2000


class TrainingError(RuntimeError):
    """A training ended by an error; the message is the end of its terminal."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A batch, and the engine that decodes it."""

    prompts: int
    samples: int
    """of a prompt"""
    seats: int
    """requests that the engine decodes at once"""
    cap: int
    """tokens of a response, at most"""
    prompt_length: int = 128

    @property
    def longest(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_length + self.cap

    @property
    def micro_batch(self) -> int:
        """Tokens of a micro-batch, which takes one sample at least."""
        return max(16_384, self.longest)

    def overrides(self) -> list[str]:
        """Hydra's."""
        return [
            f"data.train_batch_size={self.prompts}",
            f"data.max_prompt_length={self.prompt_length}",
            f"data.max_response_length={self.cap}",
            f"actor_rollout_ref.rollout.n={self.samples}",
            f"actor_rollout_ref.rollout.max_num_seqs={self.seats}",
            f"actor_rollout_ref.rollout.max_model_len={self.longest}",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={self.micro_batch}",
        ]


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace task: random weights of a shape, and response lengths that are drawn beforehand."""

    shape: str
    vocabulary: int
    median: int
    sigma: float
    """of the lengths' logarithm"""
    sizes: Sizes

    def write(self, scratch: Path) -> Path:
        """Write model and prompts, unless they are there; returns their folder."""
        folder = scratch / f"task_{self.shape}"
        lengths = {"--median": self.median, "--sigma": self.sigma, "--cap": self.sizes.cap, "--rows": _ROWS}
        chosen = {"--out": folder, "--shape": self.shape, "--vocabulary": self.vocabulary, **lengths}
        prepare([str(word) for option in chosen.items() for word in option])
        return folder

    def overrides(self, folder: Path) -> list[str]:
        """Hydra's, for the task in ``folder``; the weights never change."""
        rollout, reward = "actor_rollout_ref.rollout", "reward.custom_reward_function"
        return [
            *self.sizes.overrides(),
            f"actor_rollout_ref.model.path={folder / 'model'}",
            f"data.train_files={folder / 'data' / 'train.parquet'}",
            f"data.val_files={folder / 'data' / 'val.parquet'}",
            "actor_rollout_ref.actor.optim.lr=0",
            f"{rollout}.agent.default_agent_loop=budgeted_agent",
            f"{rollout}.agent.agent_loop_config_path={HERE / 'agent_loops.yaml'}",
            f"{reward}.path=pkg://recipe.partial_rollout.tasks.trace_task.agent_loop",
            f"{reward}.name=compute_score",
            "trainer.test_freq=-1",
        ]


TINY = Trace("tiny", 512, median=24, sigma=0.6, sizes=Sizes(prompts=4, samples=4, seats=16, cap=96))
"""for a CPU: what CI runs"""


def command(arm: str, directory: Path, steps: int, overrides: list[str], *, tiny: bool) -> list[str]:
    """Train ``arm`` for ``steps`` steps with its records in ``directory``."""
    common = [
        f"arm={ARMS[arm]}",
        f"trainer.default_local_dir={directory}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=100",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        "trainer.save_freq=-1",
        # All rounds are alike, the last ones too.
        "partial_rollout.drain=False",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "reward.num_workers=1",
        # Engines say what they run with, and what sleeping frees.
        "ray_kwargs.ray_init.log_to_driver=True",
    ]
    # Of a tiny training nearly all the time is the start of its processes.
    few = ["platform=cpu", "actor_rollout_ref.rollout.agent.num_workers=1", "partial_rollout.reward_in_worker=True"]
    chosen = {each.split("=")[0]: each for each in [*common, *overrides, *(few if tiny else [])]}
    return [sys.executable, "-m", "recipe.partial_rollout.main_ppo", "--config-name", "own_job", *chosen.values()]


def steps_of(
    command: list[str], directory: Path, until: float, sampler: Sampler | None = None
) -> Iterator[dict[str, Any]]:
    """Run ``command``, and give verl's metrics of each step as soon as they are logged.

    Args:
        until: time of ``time.monotonic`` at which the training is killed; what it has logged by then is given.
        sampler: samples the stacks of its processes.

    Raises:
        TrainingError: it failed.
    """
    # What an earlier try has left, which was cut off or is in the figures.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    # verl mutes vLLM below warnings.
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "PYTHONWARNINGS": "ignore"}
    with (directory / TERMINAL).open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    metrics, seen = directory / "metrics.jsonl", 0
    try:
        while True:
            ended = process.poll() is not None or time.monotonic() > until
            if sampler is not None:
                sampler.attach(process.pid)
            lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            for line in whole[seen:]:
                found = json.loads(line)
                yield {"step": found["step"], **found["data"]}
            seen = len(whole)
            if ended:
                break
            time.sleep(_POLL_S)
        if process.returncode:
            raise TrainingError((directory / TERMINAL).read_text(errors="replace")[-_SHOWN:])
    finally:
        # An engine that is left would hold the device.
        kill_session(process)
        if sampler is not None:
            sampler.stop()


@dataclass(frozen=True, slots=True)
class Lesson:
    """A model that learns, and is validated every few steps."""

    model: Path
    data: Path
    """folder of ``train.parquet`` and ``val.parquet``"""
    sizes: Sizes
    reward: str
    """module of ``compute_score``"""
    lr: float
    more: tuple[str, ...] = ()
    """overrides of this task alone"""

    def overrides(self, *, tiny: bool) -> list[str]:
        """Hydra's."""
        return [
            *self.sizes.overrides(),
            f"actor_rollout_ref.model.path={self.model}",
            f"data.train_files={self.data / 'train.parquet'}",
            f"data.val_files={self.data / 'val.parquet'}",
            f"data.val_max_samples={4 if tiny else 64}",
            f"reward.custom_reward_function.path={self.reward}",
            "reward.custom_reward_function.name=compute_score",
            f"actor_rollout_ref.actor.optim.lr={self.lr}",
            f"trainer.test_freq={2 if tiny else 4}",
            *self.more,
        ]

    def train(self, arm: str, options: Namespace) -> Iterator[dict[str, Any]]:
        """Train ``arm`` for its share of the time; give the figures of each step as soon as they are logged."""
        until = time.monotonic() + options.seconds / len(options.arms or ARMS)
        directory = options.scratch / "runs" / f"{options.name}_{arm}"
        steps, overrides = 2 if options.tiny else 200, self.overrides(tiny=options.tiny)
        asked, trained_s = command(arm, directory, steps, overrides, tiny=options.tiny), 0.0
        for metrics in steps_of(asked, directory, until):
            trained_s += metrics["timing_s/step"]  # validation is outside the step
            yield {
                "arm": arm,
                "step": metrics["step"],
                "trained_s": trained_s,
                "score": metrics["critic/score/mean"],
                "held_out": next(iter(held_out_rewards([metrics])), None),
                "prompt": metrics["prompt_length/mean"],
                "probs_diff": metrics.get("training/rollout_probs_diff_mean"),
                **speed(metrics, self.sizes),
            }


def speed(metrics: dict[str, Any], sizes: Sizes) -> dict[str, float | int | None]:
    """Seconds and tokens of a step, from verl's metrics of it, by the names of the tables."""
    return {
        "tokens": round(metrics["response_length/mean"] * sizes.prompts * sizes.samples),
        "mean": metrics["response_length/mean"],
        "longest": round(metrics["response_length/max"]),
        "rollout_s": metrics["timing_s/gen"],
        "pass_s": metrics.get("timing_s/old_log_prob", 0.0),
        "adv_s": metrics["timing_s/adv"],
        "update_s": metrics["timing_s/update_actor"],
        "sync_s": metrics["timing_s/update_weights"],
        "step_s": metrics["timing_s/step"],
        "interrupt_s": metrics.get("partial_rollout/timing/interrupt_s"),
        "staleness": metrics.get("partial_rollout/staleness/mean"),
        "stalest": metrics.get("partial_rollout/staleness/max"),
        "mfu_update": metrics.get("perf/mfu/actor"),
        "k3_kl": metrics.get("rollout_corr/k3_kl"),
    }
