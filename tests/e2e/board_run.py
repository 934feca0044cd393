"""A training's logging without its training: ``python board_run.py ARM DIRECTORY FIRST LAST RESUMES`` logs made-up steps.

Tracking, dashboard and pictures are those of a real run; of a step only the figures are invented, but for
the manager's.
"""

import itertools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from omegaconf import OmegaConf

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.keys import defaults_of
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Prompt, SampleOutput, Segment
from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.trace import RoundRecord
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.training.step_log import StepLog
from verl_ext.tracking_observer import observed_tracking

SECTIONS = {"actor": 12, "critic": 18, "response_length": 4, "timing_s": 9, "perf": 8, "partial_rollout/buffer": 6}


def round_of(rng, step, partial):
    """64 responses with a long tail on two replicas of 24 slots; under PR the longest tenth is cut off."""
    lengths = np.minimum(rng.lognormal(6.2, 0.9, 64), 6000)
    cap = np.quantile(lengths, 0.9) if partial else lengths.max()
    free, calls = np.zeros((2, 24)), []
    for i, length in enumerate(np.minimum(lengths, cap)):
        cut = bool(partial and length == cap)
        replica = i % 2
        slot = int(free[replica].argmin())
        start = free[replica, slot]
        free[replica, slot] = start + length / 60
        calls.append(EngineCall(replica, start, free[replica, slot], int(length), step, interrupted=cut))
    trained = [TrainedGroup(0, 0, [int(length) for length in lengths], [0] * 64)]
    return RoundRecord(step, step - 1, RolloutPhase(0.0, float(free.max()), tuple(calls)), trained)


def metrics_of(rng, round_, partial):
    """What verl and the recipe log of a step."""
    seconds, tokens = round_.phase.seconds, round_.phase.decoded_tokens
    data = {f"{name}/figure_{i}": float(rng.random()) for name, count in SECTIONS.items() for i in range(count)}
    data |= {
        "global_seqlen/min": 100.0,
        "training/global_step": round_.step,
        "timing_s/step": seconds + 30,
        "timing_s/gen": seconds,
        "partial_rollout/rollout/efficiency": min(1.0, tokens / seconds / 2880),
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
        }
    return data


def manager_metrics(rng, first):
    """The real manager's figures of steps from ``first`` on, as the trainer gets them: it has the batch of the step."""
    admission = Admission(Mode.WINDOW, 4, 1, 1.0, 8, 8, max_staleness=3)
    manager = PromptsManager(admission, Scheduling(), time.monotonic)
    manager.register_worker("w0", 8)
    left = {}
    for version in itertools.count(first):
        manager.offer([Prompt(f"{version}/{i}", 0, {}) for i in range(manager.wanted)])
        manager.begin_version(version - 1)
        left |= {
            grant.sample_id: int(rng.integers(1, 9)) for grant in manager.claim("w0") if grant.sample_id not in left
        }
        while not manager.round_complete():
            soonest = min(left, key=left.__getitem__)
            zeros = np.zeros(left.pop(soonest), np.int32)
            manager.finish(soonest, SampleOutput(zeros[:0], zeros, zeros, zeros, zeros, 1, None, {}, 2, {}))
        taken = manager.take_batch(stop=True)
        for sample_id in left:
            manager.add_segment(sample_id, Segment(np.zeros(1, np.int32), np.zeros(1, np.float32), version - 1))
            manager.interrupt(sample_id)
        yield {f"partial_rollout/{key}": value for key, value in manager.metrics().items()}
        manager.acknowledge([group.uid for group in taken])


def main(arm, directory, first, last, resumes):
    partial = arm == "PR"
    directory = Path(directory)
    os.environ["SWANLAB_MODE"] = "local"
    os.environ["SWANLAB_LOG_DIR"] = str(directory.parent / "swanlog")
    config = OmegaConf.create(
        {
            "partial_rollout": defaults_of(PartialRolloutConfig) | {"enable": partial},
            "trainer": {
                "logger": ["swanlab"],
                "resume_mode": "auto",
                "experiment_name": arm,
                "total_training_steps": last,
            },
            "actor_rollout_ref": {"rollout": {"n": 8}},
        }
    )
    log = StepLog(config, SimpleNamespace(enable=partial), directory, last)
    rng = np.random.default_rng(first + 100 * partial)
    spent, managers = [], manager_metrics(rng, first)
    with observed_tracking(lambda data, step: log.figures(data) | data, table=log.open(resumes=resumes)):
        from verl.utils.tracking import Tracking

        tracking = Tracking("made_up", arm, ["swanlab"], OmegaConf.to_container(config))
        if first == 1:
            # verl validates before the first step: it is the held-out reward that opens the section.
            tracking.log({"val-core/made_up/acc/mean@4": 0.3}, 0)
        for step in range(first, last + 1):
            round_ = round_of(rng, step, partial)
            data = metrics_of(rng, round_, partial) | (next(managers) if partial else {})
            began = time.perf_counter()
            tracking.log(data, step)
            log.close(step, round_)
            spent.append(time.perf_counter() - began)
        tracking.finish()
    usual = np.median(spent)
    print(
        f"logging took {np.mean(spent):.3f} s a step: {usual:.3f} s of figures, up to {max(spent):.2f} s with pictures"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "resumes")
