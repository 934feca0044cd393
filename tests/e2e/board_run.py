"""A training's logging without its training: ``python board_run.py ARM DIRECTORY FIRST LAST BRANCH`` logs made-up steps.

Tracking, dashboard and pictures are those of a real run; of a step only the figures are invented.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import defaults_of
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.figures import overview
from recipe.partial_rollout.records.run_log import EngineCall, RolloutPhase, Round, TrainedGroup
from recipe.partial_rollout.training.step_log import StepLog
from recipe.partial_rollout.training.trackers import open_run
from verl_ext.tracking_observer import observed_tracking


def round_of(rng, step, partial):
    """64 responses with a long tail on two replicas; under PR the longest tenth is cut off."""
    lengths = np.minimum(rng.lognormal(6.2, 0.9, 64), 6000)
    cap = np.quantile(lengths, 0.9) if partial else lengths.max()
    calls = tuple(
        EngineCall(i % 2, 0.0, min(length, cap) / 60, int(min(length, cap)), step, interrupted=bool(length > cap))
        for i, length in enumerate(lengths)
    )
    tokens, zeros = [int(length) for length in lengths], [0] * 64
    group = TrainedGroup(
        uid="0/0", order=0, prompt="", lengths=tokens, staleness=zeros, segments=zeros, tokens=sum(tokens)
    )
    return Round(step=step, phase=RolloutPhase(0.0, float(cap / 60), calls), trained=[group])


def metrics_of(rng, round_, partial):
    """What verl and the recipe log of a step."""
    seconds, tokens = round_.phase.seconds, round_.phase.decoded_tokens
    sections = ("actor", "critic", "response_length", "perf", "partial_rollout/buffer")
    data = {f"{name}/figure_{i}": float(rng.random()) for name in sections for i in range(8)}
    data |= {
        "training/global_step": round_.step,
        "critic/score/mean": float(rng.random()),
        "rollout_corr/k3_kl": float(rng.random()) * 1e-4,
        "timing_s/step": seconds + 30,
        "timing_s/gen": seconds,
        "partial_rollout/rollout/bubble_fraction": max(0.0, 1 - tokens / seconds / 2880),
        "partial_rollout/rollout/tokens_per_s": tokens / seconds,
    }
    if round_.step % 3 == 0:
        data["val-core/made_up/acc/mean@4"] = 0.9 - 0.6 * np.exp(-round_.step / 12) + float(rng.normal(0, 0.01))
    if partial:
        data |= {
            "partial_rollout/staleness/mean": 0.8 + float(rng.normal(0, 0.1)),
            "partial_rollout/staleness/max": 3,
            "partial_rollout/off_policy_token_fraction": 0.3 + float(rng.normal(0, 0.03)),
            "partial_rollout/length/bias": 1 + float(rng.normal(0, 0.1)),
        }
    return data


def main(arm, directory, first, last, branch):
    partial, directory = arm == "PR", Path(directory)
    os.environ["SWANLAB_MODE"] = "local"
    os.environ["SWANLAB_LOG_DIR"] = str(directory.parent / "swanlog")
    trainer = {"logger": ["swanlab"], "resume_mode": "auto", "experiment_name": arm, "total_training_steps": last}
    config = OmegaConf.create(
        {
            "partial_rollout": defaults_of(PartialRolloutConfig) | {"enable": partial},
            "trainer": trainer,
            "actor_rollout_ref": {"rollout": {"n": 8}},
        }
    )
    log, rng = StepLog(config, SimpleNamespace(enable=partial), last), np.random.default_rng(first)
    log._sample = "-- one sample of step 1"
    open_run(config.trainer.logger, branch)
    with observed_tracking(lambda data, step: overview(data, partial=partial) | data):
        from verl.utils.tracking import Tracking

        tracking = Tracking("made_up", arm, ["swanlab"], OmegaConf.to_container(config))
        if first == 1:
            # verl validates before the first step: it is the held-out reward that opens the section.
            tracking.log({"val-core/made_up/acc/mean@4": 0.3}, 0)
        for step in range(first, last + 1):
            round_ = round_of(rng, step, partial)
            tracking.log(metrics_of(rng, round_, partial), step)
            log.close(step, round_)
        tracking.finish()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
