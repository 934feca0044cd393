"""The runner of studies: what is complete, what is missing, and what a run is started with."""

import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.training.trainer_config import check_correction
from tests.studies.arm import BASELINE, Arm
from tests.studies.learning.arms import ARMS, COMMON, at_rates
from tests.studies.runner import Study, StudyError

STEPS = 4
PR = Arm("PR", "PR", ("partial_rollout.max_staleness=4",))


def write_run(directory, *, steps=STEPS, complete=True):
    """A run of so many steps."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [{"step": step, "data": {"training/global_step": step}} for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "run.json").write_text(json.dumps({"complete": complete}))


def build_study(out, *, seeds=(1, 2), **options):
    return Study(out, (BASELINE, PR), tuple(seeds), STEPS, "quickstart_cpu", **options)


def test_every_arm_of_the_learning_study_composes_and_passes_the_recipes_checks(composed_config, tmp_path):
    names = [name for name in ARMS if not name.startswith("v1")]
    study = Study(tmp_path, at_rates(names, (3e-4,)), (1,), STEPS, "quickstart_cpu", COMMON)
    for arm in study.arms:
        config = composed_config("quickstart_cpu", *study.command(arm, 1)[5:])
        settings = PartialRolloutConfig.from_config(config)
        if settings.enable:
            check_correction(config, settings)
        assert config.data.seed == config.actor_rollout_ref.rollout.seed == 1
        assert config.actor_rollout_ref.actor.optim.lr == 3e-4


def test_complete_run_is_not_run_again(tmp_path):
    study = build_study(tmp_path)
    write_run(study.directory(PR, 1))
    write_run(study.directory(PR, 2), steps=STEPS - 1)
    write_run(study.directory(BASELINE, 1), complete=False)
    assert {(arm.name, seed) for arm, seed in study.missing()} == {("PR", 2), ("noPR", 1), ("noPR", 2)}


def test_run_with_other_overrides_is_not_taken_for_one_of_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(returncode=0))
    small = build_study(tmp_path, seeds=(1,), overrides=("data.train_batch_size=8",))
    assert small.run_missing() == 2
    write_run(small.directory(PR, 1))
    assert small.is_complete(PR, 1)
    large = build_study(tmp_path, seeds=(1,), overrides=("data.train_batch_size=16",))
    with pytest.raises(
        StudyError, match=r"was run with data.train_batch_size=8, this study has data.train_batch_size=16"
    ):
        list(large.missing())
    # More of the same is no other study.
    longer = replace(small, steps=STEPS + 1)
    assert not longer.is_complete(PR, 1)


def test_what_a_run_learns_does_not_depend_on_where_it_lies(tmp_path):
    here, there = build_study(tmp_path / "here"), build_study(tmp_path / "there")
    assert here.alike(PR, 1) == there.alike(PR, 1)
    assert "data.seed=1" in here.alike(PR, 1) and here.alike(PR, 1) != here.alike(PR, 2)
