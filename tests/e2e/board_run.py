"""A training's logging without its training: ``python board_run.py ARM DIRECTORY FIRST LAST BRANCH`` logs made-up steps.

Tracking, dashboard and pictures are those of a real run; of a step only the figures are invented.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf

from recipe.partial_rollout.config.keys import defaults_of
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.metrics import overview
from recipe.partial_rollout.records.run_log import EngineCall, RolloutPhase, Round, TrainedGroup
from recipe.partial_rollout.training.step_log import StepLog
from recipe.partial_rollout.training.trackers import open_run
from verl_ext.tracking_observer import observed_tracking

NAMES = (
    "critic/score/mean",
    "rollout_corr/k3_kl",
    "timing_s/step",
    "timing_s/gen",
    "partial_rollout/rollout/bubble_fraction",
    "partial_rollout/rollout/tokens_per_s",
    "actor/entropy",
)
OF_PR = ("staleness/mean", "staleness/max", "off_policy_token_fraction", "length/bias")


def round_of(step):
    """64 responses on two replicas."""
    lengths, zeros = [100 * i for i in range(1, 65)], [0] * 64
    calls = tuple(EngineCall(i % 2, 0.0, length / 60, length, step) for i, length in enumerate(lengths))
    group = TrainedGroup(
        uid="0/0", order=0, prompt="", lengths=lengths, staleness=zeros, segments=zeros, tokens=sum(lengths)
    )
    return Round(step=step, phase=RolloutPhase(0.0, lengths[-1] / 60, calls), trained=[group])


def metrics_of(step, partial):
    """What verl and the recipe log of a step."""
    names = [*NAMES, *(f"partial_rollout/{name}" for name in OF_PR if partial)]
    validated = {"val-core/made_up/acc/mean@4": 0.5} if step % 3 == 0 else {}
    return {"training/global_step": step, **dict.fromkeys(names, step / 100), **validated}


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
    log = StepLog(config, SimpleNamespace(enable=partial), last)
    log._sample = "-- one sample of step 1"
    open_run(config.trainer.logger, branch)
    with observed_tracking(lambda data, step: overview(data, partial=partial) | data):
        from verl.utils.tracking import Tracking

        tracking = Tracking("made_up", arm, ["swanlab"], OmegaConf.to_container(config))
        if first == 1:
            # verl validates before the first step: it is the held-out reward that opens the section.
            tracking.log({"val-core/made_up/acc/mean@4": 0.3}, 0)
        for step in range(first, last + 1):
            tracking.log(metrics_of(step, partial), step)
            log.close(step, round_of(step))
        tracking.finish()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
