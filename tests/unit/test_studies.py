"""The studies: their arms compose, a run is trained once and as asked, and figures are those worked out by hand."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipe.partial_rollout.preflight.rules import check_rules
from tests.studies.arm import BASELINE, Arm
from tests.studies.learning.arms import ARMS, COMMON, at_rates
from tests.studies.learning.figures import Gap, compare
from tests.studies.learning.published import staleness_table
from tests.studies.learning.run import SERIES, LearningRun
from tests.studies.learning.stale_negatives import Candidate, kept
from tests.studies.peers.arms import ARMS as PEERS
from tests.studies.peers.arms import SEPARATE
from tests.studies.processes import WarmProcess, run_fresh
from tests.studies.runner import Study, StudyError
from tests.unit.runs import write_training

STEPS = 6
RATE = (3e-4,)
PR = Arm("PR", "PR", ("partial_rollout.max_staleness=4",))


def composed(study, arm, compose, seed=1):
    command = study.command(arm, seed)
    return compose("quickstart_cpu", *command[command.index("quickstart_cpu") + 1 :])


# -- runs ----------------------------------------------------------------------------------------------------------------


def test_every_arm_composes_and_passes_the_recipes_checks(composed_config, tmp_path):
    names = [name for name in ARMS if not name.startswith("v1")]
    learning = Study(tmp_path, at_rates(names, RATE), (1,), STEPS, "quickstart_cpu", COMMON)
    for arm in learning.arms:
        config = composed(learning, arm, composed_config)
        if config.partial_rollout.enable:
            assert not list(check_rules(config))
        assert config.data.seed == config.actor_rollout_ref.rollout.seed == 1
        assert config.actor_rollout_ref.actor.optim.lr == 3e-4
    peers = Study(tmp_path, PEERS, (1,), STEPS, "quickstart_cpu")
    for arm in PEERS:
        config = composed(peers, arm, composed_config)
        rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
        assert trainer.use_v1 == arm.name.startswith("v1")
        if arm.name in SEPARATE:
            assert rollout.nnodes * rollout.n_gpus_per_node == trainer.nnodes * trainer.n_gpus_per_node == 1, arm.name
            assert config.ray_kwargs.ray_init.num_gpus >= 2 and rollout.checkpoint_engine.backend == "shm", arm.name
        if arm.name in SEPARATE and trainer.use_v1:
            assert trainer.v1.trainer_mode == "separate_async" and trainer.v1.separate_async.parameter_sync_step == 1


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (Candidate.SAMPLE, [[0, 0, 1], [1, 1, 1], [1, 1, 1]]),
        (Candidate.AGE, [[1 / 3, 1, 1], [1, 1, 1], [1, 1, 1 / 2]]),
        (Candidate.DUAL, [[1, 1, 1], [1, 1, 1], [0, 1, 1]]),
    ],
)
def test_candidate_lessens_stale_negatives_alone(candidate, expected):
    """Samples: less likely than when it was made; with a positive advantage; more likely."""
    behaviour = torch.zeros(3, 3)
    current = torch.tensor([[-0.1, -0.02, 9.0], [-0.1, -0.1, -0.1], [1.2, 0.0, 0.0]])
    advantages, age = torch.tensor([[-1.0] * 3, [1.0] * 3, [-1.0] * 3]), torch.tensor([[2, 0, 2], [2] * 3, [0, 0, 1]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
    found = kept(candidate, current=current, behaviour=behaviour, advantages=advantages, age=age, mask=mask)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float32))


def test_complete_run_is_not_trained_again_nor_taken_for_another(tmp_path, monkeypatch):
    def train(command, **_):
        if "recipe.partial_rollout.main_ppo" in command:
            found = next(word for word in command if word.startswith("trainer.default_local_dir="))
            write_training(Path(found.partition("=")[2]), *[{}] * STEPS)
        return subprocess.CompletedProcess(command, 0, stdout="abc\n")

    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(WarmProcess, "run", lambda self, command, directory: run_fresh(command, directory))
    small = Study(tmp_path, (BASELINE, PR), (1, 2), STEPS, "quickstart_cpu", ("data.train_batch_size=8",))
    write_training(small.directory(PR, 1), *[{}] * STEPS)
    write_training(small.directory(PR, 2), *[{}] * (STEPS - 1))
    write_training(small.directory(BASELINE, 1), *[{}] * STEPS, complete=False)
    assert {(arm.name, seed) for arm, seed in small.missing()} == {("PR", 2), ("noPR", 1), ("noPR", 2)}
    assert small.run_missing() == 3 and not list(small.missing())
    large = replace(small, overrides=("data.train_batch_size=16",))
    with pytest.raises(StudyError, match=r"run with data.train_batch_size=8, this study has data.train_batch_size=16"):
        list(large.missing())
    assert not replace(small, steps=STEPS + 1).is_complete(PR, 1), "more of the same is no other study"


# -- figures -------------------------------------------------------------------------------------------------------------


def build_run(held_out, *, arm="noPR", rate=3e-4, seed=1, step_s=2.0, **series):
    """A run validated after every step, of two seconds each."""
    steps = len(held_out)
    known = {"rollout_s": (1.0,) * steps, "step_s": (step_s,) * steps, "length": (100.0,) * steps}
    known = dict.fromkeys(SERIES, ()) | known | series
    return LearningRun(arm, rate, 0, seed, (), "task", "abc", tuple(range(1, steps + 1)), tuple(held_out), known)


def test_figures_of_a_run_are_means_of_three_validations():
    run = build_run((0.1, 0.2, 0.3, 0.6, 0.9))
    assert run.final == pytest.approx(0.6), "the last three"
    assert build_run((0.5, 0.9, 0.9, 0.9, 0.6, 0.6)).fall == pytest.approx(0.2), "from the best three"
    assert build_run((0.1, 0.2, 0.3, 0.4)).fall == 0
    k3 = (0.001,) * 5 + (0.02,)
    fallen = build_run((0.5, 0.9, 0.9, 0.9, 0.6, 0.6), k3_kl=k3)
    assert (fallen.falls_at, fallen.warned_at, fallen.ess_at_warning) == (5, 6, None)
    assert build_run(fallen.held_out, k3_kl=k3, ess=(1.0,) * 5 + (0.9,)).ess_at_warning == 0.9
    assert build_run((0.5, 0.9, 0.8, 0.9, 0.9, 0.9)).falls_at is None, "one low validation is not a fall"
    assert build_run((0.5, 0.95, 0.8, 0.9, 0.91, 0.7)).seconds_to(0.9) == 4.0, "twice in a row"


def test_arms_are_compared_within_pairs():
    rising = (0.5, 0.9, 0.9, 0.9)
    runs = [
        build_run(rising, seed=1),
        build_run(rising, arm="PR_overtake_0_3", seed=1, rollout_s=(0.5,) * 4, step_s=1.0),
        build_run((0.9, 0.6, 0.6, 0.6), seed=2),
        build_run((0.9, 0.7, 0.7, 0.7), arm="PR_overtake_0_3", seed=2, rollout_s=(0.4,) * 4),
        build_run(rising, arm="PR_overtake_0_3", seed=3),
        build_run(rising * 2, arm="PR_overtake_0_3", seed=1),
    ]
    base, ours = compare(runs)
    assert (base.arm, base.held, ours.held) == ("noPR", "1 of 2", "2 of 3"), "a run without a pair, no longer run"
    assert [run.seed for run in ours.runs] == [1, 2]
    assert ours.gap(lambda run: run.final) == Gap(pytest.approx(0.05), pytest.approx(0.05))
    assert ours.ratio(lambda run: run.rollout_per_token) == pytest.approx(0.45)
    assert ours.ratio(lambda run: run.step_per_token) == pytest.approx(0.75)
    late = (0.5, 0.5, 0.5, 0.9, 0.9)
    _, ours = compare([build_run(late), build_run(late, arm="PR_overtake_0_3", step_s=1.0)])
    assert ours.time_ratios(lambda base: 0.9) == [0.5]
    assert ours.time_ratios(lambda base: base.final + 1) == [], "neither reaches it"


def test_areals_table_has_a_row_an_eta_and_says_what_has_not_run():
    held, fell = (0.9,) * 36, (0.9,) * 18 + (0.3,) * 18
    runs = [build_run(held), build_run((*held, 0.9), seed=2), build_run(held[1:], seed=3)]
    runs += [build_run(held, arm="PR_eta_4", step_s=1.0), build_run(held, arm="PR_eta_4_wait")]
    # A cell's runs may differ in length, each from its pair's; runs of less than 36 steps are other studies'.
    runs += [build_run(fell, arm="PR_eta_8_uncorrected"), build_run((*fell, 0.3), arm="PR_eta_8_uncorrected", seed=2)]
    runs += [build_run(fell[1:], arm="PR_eta_8_uncorrected", seed=3)]
    # As runs are called whose update gives the proximal policy; other rates are other tables.
    runs += [build_run(held, arm="PR_eta_2_mask_update"), build_run(fell, arm="PR_eta_2_mask", rate=1e-4)]
    rows = {row[0]: row[1:] for row in staleness_table(runs).rows}
    assert [*rows] == ["0 (noPR)", "1", "2", "4", "8", "16", "unbounded", "4, without interruption"]
    none = ["not run", "", ""]
    assert rows["4"] == ["+0.000", "0 of 1", "0.50", *none, *none]
    assert rows["8"] == [*none, "-0.600 ± 0.000", "2 of 2", "1.00", *none]
    assert rows["2"] == [*none, *none, "+0.000", "0 of 1", "1.00"]
    assert rows["16"] == none * 3 and rows["4, without interruption"][:3] == ["+0.000", "0 of 1", "1.00"]
