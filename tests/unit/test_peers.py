"""The table of peers over runs whose figures can be worked out by hand."""

import json

import numpy as np
import pytest

from tests.studies.__main__ import main as run_study
from tests.studies.peers.arms import ARMS, SEPARATE
from tests.studies.peers.document import table_of
from tests.studies.peers.figures import compare
from tests.studies.peers.run import PeerRun
from tests.studies.runner import Study
from tests.unit.runs import write_training

STEPS = 8


def build_run(arm, repeat, *, rollout_s=1.0, stale=0.0, full=None, tokens=1000.0, quality_s=None, **figures):
    ones = np.ones(STEPS)
    plain = dict.fromkeys(("staleness_p95", "off_policy", "held_out", "interrupt_s", "stolen_cpu")) | {
        "rollout_s": rollout_s * ones,
        "step_s": (rollout_s + 1) * ones,
        "tokens": tokens * ones,
        "staleness": stale * ones,
        "staleness_max": stale * ones,
        "dropped": 0,
        "reward": ones,
        "quality_s": quality_s,
        "full_tokens_per_s": full,
    }
    return PeerRun(arm, repeat, **(plain | figures))


def write_run(directory, *, rollout_s, staleness=None, ours=True):
    """A run of 4 samples a step, 100 tokens each."""
    step = {
        "timing_s/gen": rollout_s,
        "timing_s/step": 2 * rollout_s,
        "response_length/mean": 100.0,
        "critic/score/mean": 0.5,
    }
    if staleness is not None:
        name = "partial_rollout/staleness" if ours else "training/off_policy/trajectory_staleness_worst"
        step |= {f"{name}/mean": staleness, f"{name}/max": 2 * staleness}
        own = {f"{name}/p95": staleness, "partial_rollout/off_policy_token_fraction": 0.25}
        step |= own if ours else {"training/off_policy/evicted_samples": 1, "peer/sample_s": 0.5 * rollout_s}
    steps = [dict(step) for _ in range(STEPS)]
    if ours and staleness is not None:
        for i, each in enumerate(steps, 1):
            each["partial_rollout/timing/interrupt_s"] = 0.0625 * i
    steps[-1]["val-core/clock10/acc/mean@4"] = 0.75 + rollout_s / 8
    write_training(directory, *steps, batch_groups=2, samples_per_group=2)
    if ours:
        (directory / "machine.json").write_text(json.dumps({"stolen_cpu": 0.125}))


def test_wall_time_is_compared_from_the_first_batch_to_the_last():
    """In the first step the engines fill, and a separate trainer has nothing to do meanwhile."""
    first = np.array([100.0] + [0.0] * (STEPS - 1))
    bases = build_run("noPR", 1, rollout_s=3.0, tokens=1000.0)
    ours = build_run("PR_separate_2", 1, rollout_s=1.0, tokens=500.0, step_s=first + 1.5, held_s=np.full(STEPS, 0.03))
    base, row = compare([bases, ours])
    assert base.median("wall_ms") == 4000 and row.median("wall_ms") == 3000
    assert row.median("wall_ratio") == 0.75
    assert row.median("trainer_waits") == pytest.approx(1 / 1.5) and base.median("trainer_waits") == 0.75
    assert row.median("engines_held") == pytest.approx(0.02) and np.isnan(base.median("engines_held"))


def test_run_that_decodes_while_it_trains_has_no_rollout_time(tmp_path):
    separate = [arm.name for arm in ARMS if arm.name in SEPARATE]
    assert {"PR_separate_1.5", "v1_separate_async"} <= set(separate)
    rows = compare([build_run("noPR", 1, full=2000.0), *(build_run(arm, 1, full=2000.0) for arm in separate)])
    for row in rows[1:]:
        for figure in ("rollout_ms", "rollout_ratio", "steady_rollout_ratio", "tokens_per_s", "efficiency"):
            assert np.isnan(row.median(figure)), figure
    shown = dict(zip(table_of(rows).header, table_of(rows).rows[1], strict=False))
    assert shown["rollout / noPR (spread)"] == shown["efficiency"] == "-"
    assert shown["the same / noPR (spread)"] == "1.00 (1.00 to 1.00)"


def test_every_arm_composes_and_separate_ones_have_the_same_split_and_send_every_version(tmp_path, composed_config):
    study = Study(tmp_path, ARMS, (1,), STEPS, "quickstart_cpu")
    for arm in ARMS:
        command = study.command(arm, 1)
        config = composed_config("quickstart_cpu", *command[command.index("quickstart_cpu") + 1 :])
        rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
        assert trainer.use_v1 == arm.name.startswith("v1")
        if arm.name in SEPARATE:
            assert rollout.nnodes * rollout.n_gpus_per_node == trainer.nnodes * trainer.n_gpus_per_node == 1, arm.name
            assert config.ray_kwargs.ray_init.num_gpus >= 2 and rollout.checkpoint_engine.backend == "shm", arm.name
        if arm.name in SEPARATE and trainer.use_v1:
            assert trainer.v1.trainer_mode == "separate_async" and trainer.v1.separate_async.parameter_sync_step == 1
    assert table_of(compare([build_run(arm.name, 1) for arm in ARMS])).rows[0][0] == "noPR"


def test_report_is_written_from_complete_runs(tmp_path, capsys):
    for repeat in (1, 2):
        write_run(tmp_path / "noPR" / f"seed_{repeat}", rollout_s=1.0)
        write_run(tmp_path / "v1_colocate_async" / f"seed_{repeat}", rollout_s=0.8, staleness=2.0, ours=False)
        write_run(tmp_path / "PR_bounded" / f"seed_{repeat}", rollout_s=0.5, staleness=1.0)
    command = ["peers", "--out", str(tmp_path), "--report-only", "--repeats", "2", "--steps", str(STEPS)]
    assert run_study(command) == 0
    text = (tmp_path / "peers.md").read_text()
    wall = "2500 | 0.50 (0.50 to 0.50) | 50% | -"
    ratios = "0.50 (0.50 to 0.50) | 0.50 | 0.50 | - | -"
    rest = "1.00 | 1.0 | 2 | 0.25 | 0 | 1.00 | 0.500 | 0.812 ± 0.000 | - | - | 0.28 | 0.50"
    assert f"| PR, bounded | {wall} | 1250 | 800 | {ratios} | {rest} |" in text
    assert "| 2.00 | - | 4 | - | 8 |" in text, "what verl does not log, and a sample dropped in each step"
    rows = json.loads((tmp_path / "peers.json").read_text(), parse_constant=pytest.fail)
    assert {row["arm"] for row in rows} == {"noPR", "v1_colocate_async", "PR_bounded"}
    assert (tmp_path / "peers.png").stat().st_size > 5_000 and "Peers" in capsys.readouterr().out
