"""The runner of studies: what is complete, what is missing, and what a run is started with."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.rule import check_rules
from recipe.partial_rollout.preflight.rules import RULES
from tests.studies.arm import BASELINE, Arm
from tests.studies.learning.arms import ARMS, COMMON, at_rates
from tests.studies.processes import UNFIT, WarmProcess
from tests.studies.runner import Study, StudyError
from tests.unit.runs import write_training

STEPS = 4
PR = Arm("PR", "PR", ("partial_rollout.max_staleness=4",))


def build_study(out, *, seeds=(1, 2), **options):
    return Study(out, (BASELINE, PR), tuple(seeds), STEPS, "quickstart_cpu", **options)


def test_every_arm_of_the_learning_study_composes_and_passes_the_recipes_checks(composed_config, tmp_path):
    names = [name for name in ARMS if not name.startswith("v1")]
    study = Study(tmp_path, at_rates(names, (3e-4,)), (1,), STEPS, "quickstart_cpu", COMMON)
    for arm in study.arms:
        config = composed_config("quickstart_cpu", *study.command(arm, 1)[5:])
        if config.partial_rollout.enable:
            check_rules(RULES, config)
        assert config.data.seed == config.actor_rollout_ref.rollout.seed == 1
        assert config.actor_rollout_ref.actor.optim.lr == 3e-4


def test_complete_run_is_not_run_again(tmp_path):
    study = build_study(tmp_path)
    write_training(study.directory(PR, 1), *[{}] * STEPS)
    write_training(study.directory(PR, 2), *[{}] * (STEPS - 1))
    write_training(study.directory(BASELINE, 1), *[{}] * STEPS, complete=False)
    assert {(arm.name, seed) for arm, seed in study.missing()} == {("PR", 2), ("noPR", 1), ("noPR", 2)}


def test_run_with_other_overrides_is_not_taken_for_one_of_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(returncode=0))
    small = build_study(tmp_path, seeds=(1,), overrides=("data.train_batch_size=8",))
    assert small.run_missing() == 2
    write_training(small.directory(PR, 1), *[{}] * STEPS)
    large = build_study(tmp_path, seeds=(1,), overrides=("data.train_batch_size=16",))
    with pytest.raises(StudyError, match=r"run with data.train_batch_size=8, this study has data.train_batch_size=16"):
        list(large.missing())
    assert not replace(small, steps=STEPS + 1).is_complete(PR, 1), "more of the same is no other study"


WARM = f"""
import json, os, pathlib, socket
line, engines = socket.socket(fileno=0), None
for ask in line.makefile():
    found = json.loads(ask)
    wanted, code = found["arguments"][1:]
    engines = engines or wanted
    code = int(code) if engines == wanted else {UNFIT}
    with pathlib.Path(found["directory"], "runs").open("a") as runs:
        runs.write(f"{{wanted}} {{code}} {{os.getpid()}}\\n")
    line.sendall(f"{{code}}\\n".encode())
"""
"""a warm process whose runs say which engines they need and how they end"""


def test_runs_share_a_process_until_one_needs_other_engines_or_fails(tmp_path):
    asked = [("keep", 0), ("keep", 0), ("recompute", 0), ("recompute", 1), ("recompute", 0)]
    with WarmProcess((sys.executable, "-c", WARM)) as process:
        for engines, code in asked:
            command = [sys.executable, "-m", *BASELINE.program, "--config-name", engines, str(code)]
            assert process.run(command, tmp_path) == code
    runs = [line.split() for line in (tmp_path / "runs").read_text().splitlines()]
    assert [(engines, int(code)) for engines, code, _ in runs if int(code) != UNFIT] == asked
    processes = [pid for _, code, pid in runs if int(code) != UNFIT]
    assert [processes.index(pid) for pid in processes] == [0, 0, 2, 2, 4]


def test_a_warm_process_that_dies_fails_its_run_and_ends_for_another_program(tmp_path):
    with WarmProcess((sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)")) as process:
        assert process.run([sys.executable, "-m", *BASELINE.program], tmp_path) == 3
        assert process.run([sys.executable, "-c", "print('other')"], tmp_path) == 0
    assert (tmp_path / "terminal.log").read_text() == "other\n"


def test_runs_share_engines_unless_something_is_made_from_what_differs(composed_config, tmp_path):
    from recipe.partial_rollout.main_ppo import wire
    from tests.studies.warm import parts_of

    def parts(name, *overrides, seed=1):
        (arm,) = at_rates((name,), (3e-4,))
        study = Study(tmp_path, (arm,), (seed,), STEPS, "quickstart_cpu", (*COMMON, *overrides))
        config = composed_config("quickstart_cpu", *study.command(arm, seed)[5:])
        wire(config)
        return parts_of(config)

    ours = parts("PR_bounded_1.5")
    assert ours == parts("PR_overtake_0_2_mask", "partial_rollout.max_staleness=2", seed=2)
    for other in ("noPR", "PR_bounded_1.5_recompute", "PR_delayed_8_mask"):
        assert ours != parts(other), other
    assert ours != parts("PR_bounded_1.5", "actor_rollout_ref.rollout.max_num_seqs=64")
    with pytest.raises(ConfigError, match="without critic only"):
        parts("PR_bounded_1.5", "critic.enable=True")
    with pytest.raises(ConfigError, match="without devices of their own only"):
        parts("PR_eta_4")
