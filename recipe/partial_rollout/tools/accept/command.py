"""Acceptance of a machine in about 20 minutes on one GPU, without a download.

====  ==================================================================================================
A     the check finds nothing that stops a run
B     the tests of holds and log-probs, with the engine as vLLM configures it on the device
C     four steps of PR at learning rate 0 (``conf/accept_cuda.yaml``), judged by ``checks``
D     if B or C fails: again with the V1 model runner, then without asynchronous scheduling as well; the first that
      passes names the culprit
====  ==================================================================================================

Exit code 0 if A, B and C pass, else 1; ``accept.json`` has every figure, ``A.log`` and so on what was printed.
On the CPU platform (``VERL_PLATFORM=cpu``) the same runs in small, without the checks of the device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from recipe.partial_rollout.config.settings import CONF_DIR
from recipe.partial_rollout.tasks.trace_task.prepare import SHAPES
from recipe.partial_rollout.tasks.trace_task.prepare import main as prepare
from recipe.partial_rollout.tools.accept.checks import Check, judge
from recipe.partial_rollout.tools.command_line import HERE, Parser, typed
from recipe.partial_rollout.tools.reading.run_log import RunRecordError
from verl_ext.guard import cpu_requested

ENGINE = "PARTIAL_ROLLOUT_TEST_ENGINE"
"""vLLM arguments in JSON, for the engines of the tests in B (``tests/e2e/conftest.py``)"""
_TESTS = ("tests/e2e/test_hold.py", "tests/e2e/test_log_probs.py")
_REPORT = "accept.json"
_ASYNC = "actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling"
_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
_LIMIT_S = {"A": 300.0, "B": 900.0, "C": 1200.0}
_OF_SHAPE = {
    "4b": (
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    )
}
"""overrides without which an update of it does not fit 80 GB"""
_ON_CPU = ("platform=cpu", "data.max_response_length=96", "actor_rollout_ref.rollout.max_model_len=224")


@dataclass(slots=True)
class Variant:
    """An engine to try: environment and vLLM arguments that differ from the device's own choice."""

    name: str
    leaves_out: str = ""
    """what it does without, and the variant before it does not"""
    environment: dict[str, str] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


AS_CHOSEN = Variant("as vLLM chooses")
FALLBACKS = (
    Variant("V1 model runner", "model runner V2", _V1),
    Variant("V1 model runner, synchronous scheduling", "asynchronous scheduling", _V1, {"async_scheduling": False}),
)


@dataclass(slots=True)
class Result:
    """One part of the plan."""

    part: str
    variant: str
    seconds: float
    checks: list[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass
class Plan:
    """Runs the parts and keeps their results; every part is a process with a limit, and with a log in ``out``."""

    out: Path
    shape: str
    platform: str
    overrides: list[str]
    results: list[Result] = field(default_factory=list)

    def run(self) -> bool:
        """A to D; whether the machine is accepted. What an earlier acceptance left is kept beside it."""
        if (self.out / _REPORT).exists():
            set_aside(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self._part("A", AS_CHOSEN, self._check)
        plays = {"B": self._tests, "C": self._training}
        failed = [part for part, play in plays.items() if not self._part(part, AS_CHOSEN, play)]
        diagnosis = ""
        if failed:
            diagnosis = diagnose(lambda variant: self._part(failed[-1], variant, plays[failed[-1]]))
        accepted = all(result.passed for result in self.results if result.variant == AS_CHOSEN.name)
        report = {
            "accepted": accepted,
            "platform": self.platform,
            "shape": self.shape,
            "seconds": round(sum(result.seconds for result in self.results), 1),
            "diagnosis": diagnosis,
            "parts": [{**asdict(result), "passed": result.passed} for result in self.results],
        }
        (self.out / _REPORT).write_text(json.dumps(report, indent=1) + "\n")
        return accepted

    def _part(self, part: str, variant: Variant, play: Callable[[Path, Variant], list[Check]]) -> bool:
        log = self.out / f"{part}{'' if variant is AS_CHOSEN else f' {variant.name}'}.log".replace(" ", "_")
        print(f"{part} ({variant.name}), {log}", flush=True)
        start = time.monotonic()
        result = Result(part, variant.name, 0.0, play(log, variant))
        result.seconds = round(time.monotonic() - start, 1)
        self.results.append(result)
        for check in result.checks:
            print(f"  {check}", flush=True)
        return result.passed

    def _check(self, log: Path, variant: Variant) -> list[Check]:
        return [self._process("check", ["-m", HERE, "check"], log, variant, _LIMIT_S["A"])]

    def _tests(self, log: Path, variant: Variant) -> list[Check]:
        engine = dict(variant.engine)
        if self.platform == "cuda":
            engine |= {"distributed_executor_backend": "mp", "enforce_eager": False}
        # Triton's default is TF32, whose rounding is 50 times what the tests allow between reading and decoding.
        more = {ENGINE: json.dumps(engine), "TRITON_F32_DEFAULT": "ieee"}
        command = ["-m", "pytest", *_TESTS, "-q", "-s", "-p", "no:cacheprovider"]
        found = [self._process("tests", command, log, variant, _LIMIT_S["B"], more)]
        if self.platform == "cuda" and variant is AS_CHOSEN:
            said = "engine: model runner V2, asynchronous scheduling"
            is_so = said in log.read_text()
            found.append(Check("engine of the tests", is_so, str(is_so), said))
        return found

    def _training(self, log: Path, variant: Variant) -> list[Check]:
        task, run = self.out / "task", self.out / "PR"
        set_aside(run)
        small = ["--median", "24", "--cap", "96", "--vocabulary", "512"]
        sizes = ["--median", "250", "--cap", "1024"] if self.platform == "cuda" else small
        prepare(["--out", str(task), "--shape", self.shape, "--rows", "256", *sizes])
        command = ["-m", "recipe.partial_rollout.main_ppo", "--config-name", "accept_cuda", f"accept.dir={self.out}"]
        command += [*(_ON_CPU if self.platform == "cpu" else ()), *_OF_SHAPE.get(self.shape, ())]
        command += [f"+{_ASYNC}={value}" for value in variant.engine.values()]
        ended = self._process("training", [*command, *self.overrides], log, variant, _LIMIT_S["C"])
        if not ended.passed:
            return [ended]
        try:
            return [ended, *judge(run, task / "data" / "train.parquet", self.platform, log.read_text())]
        except RunRecordError as error:
            return [ended, Check("files of the run", False, str(error), "readable")]

    def _process(
        self,
        name: str,
        command: list[str],
        log: Path,
        variant: Variant,
        limit_s: float,
        more: dict[str, str] | None = None,
    ) -> Check:
        # verl mutes vLLM below warnings, and with it what the engines say of sleeping.
        quiet = {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, **quiet, **variant.environment, **(more or {})}
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
            try:
                code = f"exit code {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                code = f"killed after {limit_s:.0f} s"
            finally:
                # Whatever it has started: an engine that is left would hold the device.
                kill_group(process)
        return Check(name, code == "exit code 0", code, f"exit code 0 within {limit_s:.0f} s")


def set_aside(path: Path) -> None:
    """Move ``path``, if there is such, to the first free one of ``path.1``, ``path.2`` and so on."""
    if path.exists():
        names = (path.with_name(f"{path.name}.{i}") for i in count(1))
        path.rename(next(name for name in names if not name.exists()))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the session of ``process``, if any of it is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(30)


def diagnose(passes: Callable[[Variant], bool]) -> str:
    """What to blame, by leaving out one thing after another until the part ``passes``."""
    for variant in FALLBACKS:
        if passes(variant):
            return f"{variant.leaves_out}: it passes with {variant.name}"
    return "neither the model runner nor the scheduler: it fails without both"


def main(arguments: list[str] | None = None) -> int:
    """Run the plan; the exit code of the module docstring."""
    parser = Parser(
        typed("accept"),
        "Accept a machine: check that what the recipe promises holds on its device.",
        ["--out outputs/accept_cuda", "--shape 4b --out outputs/accept_4b"],
        "20 minutes on one GPU, from the root of a checkout, without a download; with VERL_PLATFORM=cpu the same in small, "
        "without the checks of the device. OUT/accept.json has the figures. Exit code: 0 if accepted.",
    )
    platform = "cpu" if cpu_requested() else "cuda"
    shape = "tiny" if platform == "cpu" else "0.6b"
    parser.add_argument("--out", type=Path, default=Path("outputs/accept_cuda"), help="folder for logs and figures")
    parser.add_argument("--shape", choices=list(SHAPES), default=shape, help="of the random model")
    parser.add_argument("overrides", nargs="*", help="hydra overrides of the training, after --")
    options = parser.parse_args(arguments)
    if not Path(_TESTS[0]).is_file() or CONF_DIR.resolve() != Path("conf").resolve():
        print(f"accept: run it in the root of a checkout, which has {_TESTS[0]}", file=sys.stderr)
        return 2
    accepted = Plan(options.out.resolve(), options.shape, platform, options.overrides).run()
    print(f"{'accepted' if accepted else 'NOT accepted'}: {options.out / _REPORT}")
    return 0 if accepted else 1
