"""The table of peers over runs whose figures can be worked out by hand."""

import inspect
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout.config.settings import pinned_cores
from tests.studies.__main__ import main as run_study
from tests.studies.machine import stolen_cpu
from tests.studies.peers.arms import ARMS, SEPARATE
from tests.studies.peers.document import table_of
from tests.studies.peers.figures import compare, read_rows
from tests.studies.peers.run import PeerRun, read_run
from tests.studies.runner import Study

STEPS = 8
PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance"


def arm_of(name):
    return next(arm for arm in ARMS if arm.name == name)


def build_run(arm, repeat, *, rollout_s=1.0, stale=0.0, full=None, tokens=1000.0, quality_s=None, **figures):
    ones = np.ones(STEPS)
    plain = {
        "rollout_s": rollout_s * ones,
        "step_s": (rollout_s + 1) * ones,
        "tokens": tokens * ones,
        "staleness": stale * ones,
        "staleness_max": stale * ones,
        "staleness_p95": None,
        "off_policy": None,
        "dropped": 0,
        "reward": ones,
        "held_out": None,
        "quality_s": quality_s,
        "full_tokens_per_s": full,
        "interrupt_s": None,
        "stolen_cpu": None,
    }
    return PeerRun(arm, repeat, **(plain | figures))


def write_run(directory, *, rollout_s, staleness=None, ours=True, **metrics):
    """A run of 4 samples a step, 100 tokens each."""
    directory.mkdir(parents=True)
    lines = []
    for step in range(1, STEPS + 1):
        data = {
            "training/global_step": step,
            "timing_s/gen": rollout_s,
            "timing_s/step": 2 * rollout_s,
            "response_length/mean": 100.0,
            "critic/score/mean": 0.5,
            **metrics,
        }
        if staleness is not None:
            name = "partial_rollout/staleness" if ours else "training/off_policy/trajectory_staleness_worst"
            data |= {f"{name}/mean": staleness, f"{name}/max": 2 * staleness}
            own = {
                f"{name}/p95": staleness,
                "partial_rollout/off_policy_token_fraction": 0.25,
                "partial_rollout/timing/interrupt_s": 0.0625 * step,
            }
            data |= own if ours else {"training/off_policy/evicted_samples": 1, "peer/sample_s": 0.5 * rollout_s}
        if step == STEPS:
            data["val-core/clock10/acc/mean@4"] = 0.75 + rollout_s / 8
        lines.append({"step": step, "data": data})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if ours:
        facts = {"complete": True, "batch_groups": 2, "samples_per_group": 2}
        (directory / "run.json").write_text(json.dumps(facts))
        probe = {"event": "probe", "tokens_per_s": 1000.0}
        (directory / "trace.jsonl").write_text(json.dumps(probe) + "\n")
        (directory / "machine.json").write_text(json.dumps({"stolen_cpu": 0.125}))


def test_time_to_quality_is_compared_with_the_baselines_of_the_same_repeat():
    runs = [
        build_run("noPR", 1, quality_s=100.0),
        build_run("noPR", 2),
        build_run("PR_bounded", 1, quality_s=60.0),
        build_run("PR_bounded", 2, quality_s=60.0),
    ]
    ours = compare(runs)[1]
    assert ours.values("quality_ratio")[0] == pytest.approx(0.6)
    assert np.isnan(ours.values("quality_ratio")[1])


def test_ratios_are_taken_within_a_repeat_and_then_their_median():
    runs = [
        run
        for repeat, slow in ((1, 1.0), (2, 10.0), (3, 2.0))
        for run in (build_run("noPR", repeat, rollout_s=slow), build_run("PR_bounded", repeat, rollout_s=0.4 * slow))
    ]
    baseline, ours = compare(runs)
    assert baseline.median("rollout_ratio") == 1.0
    assert ours.median("rollout_ratio") == pytest.approx(0.4) and ours.spread("rollout_ratio") == pytest.approx(
        (0.4, 0.4)
    )


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


def test_seconds_that_engines_are_held_are_read_under_each_trainers_name(tmp_path):
    metrics = {"timing_s/update_weights": 0.5, "partial_rollout/timing/hold_s": 0.25}
    names = ("PR_separate_2", "v1_separate_async_quick", "PR_bounded")
    runs = []
    for name in names:
        ours = name.startswith("PR")
        logged = metrics if ours else {"timing_s/update_weights": 0.5}
        write_run(tmp_path / name, rollout_s=1.0, staleness=1.5, ours=ours, **logged)
        runs.append(read_run(tmp_path / name, name, 1, 4))
    ours, theirs, colocated = runs
    assert (ours.held_s == 0.25).all() and (theirs.held_s == 0.5).all() and colocated.held_s is None
    assert ours.interrupt_s is None and theirs.interrupt_s is None, "a separate run is never interrupted"


def test_efficiency_is_against_the_runs_own_engine_else_the_recipes():
    runs = [
        build_run("noPR", 1, full=2000.0),
        build_run("v1_colocate_async", 1),
        build_run("PR_bounded", 1, rollout_s=0.5, full=2500.0),
    ]
    baseline, peer, ours = compare(runs)
    assert baseline.median("efficiency") == pytest.approx(1000 / 2000)
    assert peer.median("efficiency") == pytest.approx(1000 / 2500)
    assert ours.median("efficiency") == pytest.approx(2000 / 2500)


def test_every_trainers_staleness_is_read_under_its_own_name(tmp_path):
    for name, ours in (("ours", True), ("theirs", False)):
        write_run(tmp_path / name, rollout_s=1.0, staleness=1.5, ours=ours)
        run = read_run(tmp_path / name, "arm", 1, 4)
        assert (run.staleness == 1.5).all() and (run.staleness_max == 3.0).all() and (run.tokens == 400).all()
        assert run.full_tokens_per_s == (1000.0 if ours else None)
        assert run.stolen_cpu == (0.125 if ours else None)


def test_interruption_is_what_verls_rollout_takes_beyond_sampling(tmp_path):
    write_run(tmp_path / "ours", rollout_s=1.0, staleness=1.5)
    write_run(tmp_path / "theirs", rollout_s=1.0, staleness=1.5, ours=False)
    write_run(tmp_path / "never", rollout_s=1.0)
    ours, theirs, never = (read_run(tmp_path / name, "arm", 1, 4).interrupt_s for name in ("ours", "theirs", "never"))
    assert ours is not None and ours.max() == 0.0625 * STEPS and (theirs == 0.5).all() and never is None


def test_scarce_arms_keep_four_times_their_seats_in_flight(tmp_path):
    study = Study(tmp_path, ARMS, (1,), STEPS, "quickstart_cpu")
    arms = {arm.name: dict(item.split("=", 1) for item in study.command(arm, 1) if "=" in item) for arm in ARMS}
    verl, ours, queued = (arms[name] for name in ("v1_colocate_async_scarce", "PR_scarce", "PR_scarce_queued"))
    seats = {int(arm["actor_rollout_ref.rollout.max_num_seqs"]) for arm in (verl, ours, queued)}
    batches = {
        1 + int(verl["trainer.v1.colocate_async.num_warmup_batches"]),
        1 + int(ours["partial_rollout.overlap"]),
        1 + int(queued["partial_rollout.overlap"]),
    }
    assert batches == {4} and seats == {4 * 8 * 8 // 4}
    assert int(queued["partial_rollout.slots_per_replica"]) == 4 * 8 * 8


def test_separate_arms_have_the_same_split_and_send_every_version(tmp_path, composed_config):
    study = Study(tmp_path, ARMS, (1,), STEPS, "quickstart_cpu")
    for arm in ARMS:
        if arm.name not in SEPARATE:
            continue
        command = study.command(arm, 1)
        config = composed_config("quickstart_cpu", *command[command.index("quickstart_cpu") + 1 :])
        rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
        assert rollout.nnodes * rollout.n_gpus_per_node == trainer.nnodes * trainer.n_gpus_per_node == 1, arm.name
        assert config.ray_kwargs.ray_init.num_gpus >= 2 and rollout.checkpoint_engine.backend == "shm", arm.name
        assert pinned_cores(config) == (0 if arm.name.endswith("_unpinned") else 1), arm.name
        if trainer.use_v1:
            assert trainer.v1.trainer_mode == "separate_async" and trainer.v1.separate_async.parameter_sync_step == 1


def test_verls_message_without_hybrid_engines_still_breaks_at_info():
    """Once verl has mended it, the arms need not silence verl's INFO."""
    from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync, logger

    assert "flush=True" in inspect.getsource(PPOTrainerSeparateAsync._setup)
    with pytest.raises(TypeError, match="flush"):
        logger.error("message", flush=True)  # type: ignore[call-arg]


def test_driver_of_verls_trainer_runs_beside_the_trainer(monkeypatch):
    from tests.studies.peers import sampler

    moves = []
    monkeypatch.setattr(sampler.cores, "move_to", moves.append)
    options = {
        "trainer_mode": "separate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
    }
    assert sampler.PlacedReplayBuffer(**options).poll_interval == 2.0 and not moves, "verl's polls; no core of its own"
    monkeypatch.setenv(sampler.cores.VARIABLE, "0")
    assert sampler.QuickReplayBuffer(**options).poll_interval == sampler.POLL_S
    assert moves == [[0]]


@pytest.mark.parametrize(("arm", "moves", "trainer"), [("quick", [[1], [0]], "0"), ("quick_unpinned", [], "")])
def test_verls_processes_start_beside_the_trainers_core(monkeypatch, composed_config, tmp_path, arm, moves, trainer):
    from recipe.partial_rollout.tools import verl_trainer

    command = Study(tmp_path, ARMS, (1,), STEPS, "quickstart_cpu").command(arm_of(f"v1_separate_async_{arm}"), 1)
    config = composed_config("quickstart_cpu", *command[command.index("quickstart_cpu") + 1 :])
    moved, started = [], []
    monkeypatch.setenv(verl_trainer.cores.VARIABLE, "")
    monkeypatch.setattr(verl_trainer.cores, "available", lambda: [0, 1])
    monkeypatch.setattr(verl_trainer.cores, "move_to", lambda cores: moved.append(list(cores)))

    def start(config):
        started.append((list(moved), os.environ[verl_trainer.cores.VARIABLE]))

    monkeypatch.setattr(verl_trainer.main_ppo.main, "__wrapped__", start)
    monkeypatch.setattr(verl_trainer, "size_bucket", lambda config: None)
    verl_trainer.main.__wrapped__(config)
    assert started == [(moves[:1], trainer)] and moved == moves


def test_step_without_a_figure_is_named(tmp_path):
    write_run(tmp_path / "run", rollout_s=1.0)
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace("timing_s/gen", "timing_s/other", 1))
    with pytest.raises(ValueError, match="step 1 has no timing_s/gen"):
        read_run(tmp_path / "run", "arm", 1, 4)


def test_report_is_written_from_complete_runs(tmp_path, capsys):
    for repeat in (1, 2):
        write_run(tmp_path / "noPR" / f"seed_{repeat}", rollout_s=1.0)
        write_run(tmp_path / "v1_colocate_async" / f"seed_{repeat}", rollout_s=0.8, staleness=2.0, ours=False)
        write_run(tmp_path / "PR_bounded" / f"seed_{repeat}", rollout_s=0.5, staleness=1.0)
    command = ["peers", "--out", str(tmp_path), "--report-only", "--repeats", "2", "--steps", str(STEPS)]
    assert run_study(command) == 0
    text = (tmp_path / "peers.md").read_text()
    wall = "2500 | 0.50 (0.50 to 0.50) | 50% | -"
    ratios = "0.50 (0.50 to 0.50) | 0.50 | 0.50 | 0.80 | 0.80"
    rest = "1.00 | 1.0 | 2 | 0.25 | 0 | 1.00 | 0.500 | 0.812 ± 0.000 | - | - | 0.28 | 0.50"
    assert f"| PR, bounded | {wall} | 1250 | 800 | {ratios} | {rest} |" in text
    assert "| 2.00 | - | 4 | - | 8 |" in text, "what verl does not log, and a sample dropped in each step"
    json.loads((tmp_path / "peers.json").read_text(), parse_constant=pytest.fail)
    assert {row["arm"] for row in json.loads((tmp_path / "peers.json").read_text())} == {
        "noPR",
        "v1_colocate_async",
        "PR_bounded",
    }
    assert (tmp_path / "peers.png").stat().st_size > 5_000 and "Peers" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(PERFORMANCE.glob("peers*.json")), ids=lambda path: path.stem)
def test_figures_of_an_earlier_report_are_reported_again(tmp_path, path, capsys):
    assert run_study(["peers", "--report-only", "--figures", str(path), "--docs", str(tmp_path)]) == 0
    assert "PR, bounded" in capsys.readouterr().out and (tmp_path / "peers.png").exists()
    again, before = read_rows(tmp_path / "peers.json"), read_rows(path)
    assert [row.arm for row in again] == [row.arm for row in before]
    assert again[0].median("rollout_ms") == before[0].median("rollout_ms")


def test_file_that_holds_no_figures_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"encode_s": 1}')
    assert run_study(["peers", "--figures", str(tmp_path / "other.json"), "--docs", str(tmp_path)]) == 2
    assert "other.json holds no figures of peers" in capsys.readouterr().err


def test_arms_and_repeats_are_chosen_before_overrides_for_all_of_them(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(Study, "run_missing", lambda study: seen.append(study) or 0)
    command = ["peers", "--out", str(tmp_path), "--arms", "PR_april", "PR_ssim", "--repeats", "2"]
    assert run_study([*command, "--steps", "3", "data.train_batch_size=16", "data.x=1"]) == 2
    (study,) = seen
    assert [arm.name for arm in study.arms] == ["noPR", "PR_ssim", "PR_april"] and study.seeds == (1, 2)
    assert study.steps == 3 and study.overrides[-2:] == ("data.train_batch_size=16", "data.x=1")


def test_without_a_baseline_there_is_no_table(tmp_path, capsys):
    assert run_study(["peers", "--out", str(tmp_path), "--report-only"]) == 2
    assert capsys.readouterr().err.startswith("error: no complete run of noPR")


def test_every_arm_composes(composed_config, tmp_path):
    study = Study(tmp_path, ARMS, (1,), STEPS, "quickstart_cpu")
    for arm in ARMS:
        command = study.command(arm, 1)
        config = composed_config("quickstart_cpu", *command[command.index("quickstart_cpu") + 1 :])
        assert config.trainer.use_v1 == arm.name.startswith("v1")
    assert table_of(compare([build_run(arm.name, 1) for arm in ARMS])).rows[0][0] == "noPR"


def test_verls_own_trainer_composes_in_a_process_of_its_own(tmp_path):
    """Whether it finds the recipe's keys shows only where nothing else has registered them."""
    command = Study(tmp_path, ARMS, (1,), STEPS, "quickstart_cpu").command(arm_of("v1_colocate_async_quick"), 1)
    done = subprocess.run([*command, "--cfg", "job"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    config = OmegaConf.create(done.stdout)
    assert config.trainer.v1.trainer_mode == "colocate_async" and config.partial_rollout.enable


def test_stolen_cpu_is_a_share_of_the_time_in_which_processors_were_wanted():
    def times(**seconds):
        fields = dict.fromkeys(("user", "nice", "system", "idle", "iowait", "steal", "guest"), 0.0) | seconds
        return SimpleNamespace(_fields=tuple(fields), **fields)

    start = times(user=10.0, idle=50.0, steal=1.0)
    assert stolen_cpu(start, times(user=15.0, nice=4.0, idle=90.0, steal=2.0, guest=3.0)) == 0.1
    assert stolen_cpu(start, start) == 0.0
    other_system = SimpleNamespace(_fields=("user", "idle"), user=1.0, idle=1.0)
    assert stolen_cpu(other_system, other_system) is None
