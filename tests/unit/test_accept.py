"""The acceptance: a sound run passes each check, each fails for the run that breaks it, and its task needs no GPU."""

import contextlib
import json
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from transformers import AutoTokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.partial_rollout.tasks.trace_task.prepare import main as prepare
from recipe.partial_rollout.tasks.trace_task.prepare import write_model
from recipe.partial_rollout.tools.accept import checks, command
from recipe.partial_rollout.tools.accept.checks import Check, judge
from recipe.partial_rollout.tools.accept.command import AS_CHOSEN, FALLBACKS, Plan, diagnose
from tests.unit.shared import check_config

BUDGETS = [5, 9]
FREED = "Sleep mode freed 52.1 GiB memory, 3.0 GiB memory is still in use.\n"
ENGINE = "engine: model runner V2, asynchronous scheduling\n"


def build_step(
    k3=0.001, error=0.01, masked=(0.001, 0.0005, 0.0005), staleness=1, segments=2, extra=0, interrupt_s=0.05
):
    """A step that trains one response of each budget; half of its tokens are of an older version."""
    groups = [
        SimpleNamespace(prompt=f"{i}-abc", lengths=[budget + extra], staleness=[staleness], segments=[segments])
        for i, budget in enumerate(BUDGETS)
    ]
    call = SimpleNamespace(start=0.0, end=1.1, queued_s=0.1, tokens=100)
    phase = SimpleNamespace(calls=(call,))
    metrics = {
        "rollout_corr/k3_kl": k3,
        "partial_rollout/proximal/error": error,
        "partial_rollout/off_policy_token_fraction": 0.5,
    }
    ages = zip(("0", "1", "2_plus"), masked, strict=True)
    metrics |= {f"partial_rollout/trust_region/masked_age_{age}": share for age, share in ages}
    round_ = SimpleNamespace(trained=groups, phase=phase, interrupt_s=interrupt_s)
    return SimpleNamespace(round=round_, metrics=metrics, staleness=[staleness] * len(groups))


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """Names of the checks that fail for a run of these steps on a GPU."""

    def build(*steps, terminal=(FREED + ENGINE) * 4, violations=()):
        data = tmp_path / "train.parquet"
        rows = [{"index": i, "response_budget": budget} for i, budget in enumerate(BUDGETS)]
        pd.DataFrame({"extra_info": rows}).to_parquet(data)
        monkeypatch.setattr(checks, "load_run", lambda _: SimpleNamespace(steps=list(steps)))
        monkeypatch.setattr(checks, "audit", lambda _: (SimpleNamespace(violations=list(violations)), 0))
        return [check.name for check in judge(tmp_path, data, "cuda", terminal) if not check.passed]

    return build


@pytest.mark.parametrize(
    ("steps", "last", "run", "failed"),
    [
        ({}, {}, {}, None),
        ({}, {"k3": 0.006}, {}, "k3 in each step"),
        ({}, {"k3": float("nan")}, {}, "k3 in each step"),
        ({}, {"k3": 0.0021}, {}, "k3 of the last step over the first's"),
        ({}, {"error": 0.04}, {}, "proximal error"),
        ({}, {"masked": (0.001, 0.01, 0.01)}, {}, "masked shares"),
        ({}, {"extra": 1}, {}, "responses of another length than their budget"),
        ({}, {"interrupt_s": 0.12}, {}, "seconds to interrupt"),
        ({"staleness": 0}, {}, {}, "staleness"),
        ({"segments": 1}, {}, {}, "responses that were interrupted and resumed"),
        ({}, {}, {"violations": ["a prompt was lost"]}, "audit"),
        ({}, {}, {"terminal": FREED.replace("52.1", "12.1") * 9 + ENGINE}, "rounds after which sleep freed 40 GiB"),
        ({}, {}, {"terminal": FREED * 4}, "asynchronous scheduling"),
    ],
)
def test_run_is_accepted_with_all_that_it_is_to_show_and_each_check_fails_for_the_run_that_breaks_it(
    judged, steps, last, run, failed
):
    found = judged(*[build_step(**steps) for _ in range(3)], build_step(**steps, **last), **run)
    assert failed in found if failed else found == []


def test_culprit_is_found_by_leaving_out_one_thing_after_another():
    said = [diagnose(lambda variant, passes=passes: variant is passes) for passes in (*FALLBACKS, None)]
    for each, words in zip(said, ("model runner V2: it passes", "asynchronous scheduling: it", "neither"), strict=True):
        assert each.startswith(words)


def test_failing_training_is_repeated_with_each_fallback_and_the_file_names_the_culprit(monkeypatch, tmp_path):
    played = []

    def part(name):
        def play(log, variant):
            played.append((name, variant.name))
            return [Check(name, name != "C" or variant is FALLBACKS[0], "", "")]

        return play

    plan = Plan(tmp_path / "out", "tiny", "cpu", [])
    for method, name in (("_check", "A"), ("_tests", "B"), ("_training", "C")):
        monkeypatch.setattr(plan, method, part(name))
    assert not plan.run()
    assert played == [*((name, AS_CHOSEN.name) for name in "ABC"), ("C", FALLBACKS[0].name)]
    report = json.loads((tmp_path / "out" / "accept.json").read_text())
    assert not report["accepted"] and report["diagnosis"].startswith("model runner V2")
    assert [entry["passed"] for entry in report["parts"]] == [True, True, False, True]
    assert not plan.run()
    assert json.loads((tmp_path / "out.1" / "accept.json").read_text()) == report, "the first is kept"


def test_part_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    log = tmp_path / "log"
    plan = Plan(tmp_path, "tiny", "cpu", [])
    child = "import subprocess,time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    check = plan._process("training", ["-c", child], log, AS_CHOSEN, 3.0)
    assert not check.passed and check.measured == "killed after 3 s"
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(log.read_text()))
        assert left.status() == psutil.STATUS_ZOMBIE or left.wait(10) is None


def test_config_of_both_shapes_passes_the_checks(resolved_config, tmp_path):
    task = tmp_path / "task"
    assert prepare(["--out", str(task), "--shape", "tiny", "--rows", "40", "--vocabulary", "500"]) == 0
    for shape in ("0.6b", "4b"):
        config = resolved_config("accept_cuda", f"accept.dir={tmp_path}", *command._OF_SHAPE.get(shape, ()))
        assert check_config(config).enable and config.actor_rollout_ref.actor.optim.lr == 0


def test_median_at_the_cap_is_refused(tmp_path, capsys):
    assert prepare(["--out", str(tmp_path), "--median", "10", "--cap", "10"]) == 2
    assert capsys.readouterr().err == "--median=10: below --cap=10\n"


def test_the_random_model_speaks_verls_qwen3_turns(tmp_path):
    write_model(tmp_path, "tiny", vocabulary=32, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 32
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    assert type(builder).__name__ == "QwenContinuousTokenBuilder"
