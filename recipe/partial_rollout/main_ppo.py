"""Entry point: ``python -m recipe.partial_rollout.main_ppo --config-name NAME [hydra overrides]``.

With ``--check`` it trains nothing. It checks everything that needs no GPU and prints the plan of the run. It exits with
2 if a setting does not hold, with 3 if only data, model, packages or the machine lack something, and with 0 otherwise.

The trainer runs in this process, while workers, engines and the manager are Ray actors. So its errors and its progress
bar appear on the terminal, and Ctrl-C reaches it.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

import hydra
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.checkpoint.run_checkpoints import locked, writable
from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.config.settings import (
    CONF_DIR,
    OVERLONG,
    V1_MODE,
    Correction,
    register_configs,
)
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.terminal import OUTPUT, keep_output, libraries_apart, say
from recipe.partial_rollout.waits import ERROR_LOG, one_line
from verl_ext.guard import enter_recipe

if TYPE_CHECKING:
    from recipe.partial_rollout.task_runner import TaskRunner

_HERE = "recipe.partial_rollout"
CHECK = "--check"
_SHOWS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version"}
"""options with which hydra prints something and runs nothing"""
_CONSOLE = "console"
"""verl's logger that prints to the terminal; if ``trainer.logger`` has it, the output of libraries appears there,
too"""
_KV_HEADROOM = 0.05
"""share of a replica's KV blocks that stay free when a sample starts, so that it is not preempted as others grow"""

enter_recipe()
register_configs()


def apply_overrides(config: DictConfig) -> None:
    """Set verl's options to the recipe's classes and values: those of PR or of noPR, by ``partial_rollout.enable``."""
    rollout = config.actor_rollout_ref.rollout
    arm = "PartialRollout" if config.partial_rollout.enable else "Observed"
    # hydra closes the config against new keys; verl reads some that its own files do not have.
    OmegaConf.set_struct(config, False)
    rollout.agent.agent_loop_manager_class = f"{_HERE}.training.agent_loop_manager.{arm}AgentLoopManager"
    # Hydra's group engine has set the keys of the training engine; nothing reads what it leaves at the root.
    config.pop("engine", None)
    overlong = OmegaConf.select(config, OVERLONG)
    if overlong and overlong.get("enable") and overlong.get("len") is None:
        overlong.len = max(1, config.reward.reward_kwargs.max_resp_len // 5)
    if config.partial_rollout.enable:
        from recipe.partial_rollout.training.loss import weight_granularity

        ours, correction = config.partial_rollout, config.algorithm.rollout_correction
        if ours.correction != Correction.NONE and correction.rollout_is is None:
            correction.rollout_is = str(weight_granularity(config.actor_rollout_ref.actor.policy_loss.loss_mode))
        rollout.custom = {
            **(rollout.get("custom") or {}),
            "resume_kv": ours.resume_kv,
            "kv_headroom": _KV_HEADROOM,
        }
        # When KV blocks run out, the engine preempts the newest samples and spares those that are about to grow too stale.
        rollout.scheduling_policy = "priority"


def check_releases(config: DictConfig) -> None:
    """Refuse a verl, vLLM or torch that the recipe does not run with, before vLLM is imported.

    Otherwise ``verl_ext.plugin`` would fail, which verl only logs at DEBUG, and an engine would die minutes later.
    """
    if OmegaConf.select(config, "actor_rollout_ref.rollout.name") == "vllm" and (problem := releases.refusal()):
        raise ConfigError(problem)


def check_releases_early(arguments: list[str]) -> None:
    """Check the releases before hydra composes the config, because composing imports verl, which takes ten seconds.

    Nothing is checked here if hydra only prints, or if the engine may be another than vLLM: an argument sets
    ``rollout.name``, or vLLM is not installed. ``check_releases`` checks again, with the config.
    """
    if not (_SHOWS & {*arguments} or any("rollout.name=" in each for each in arguments) or releases.vllm() == "none"):
        check_releases(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}}))


def check_config_dir(arguments: list[str]) -> None:
    """Refuse a file in hydra's ``--config-dir`` that has the name of one of the recipe's or of verl's.

    Hydra searches that directory last, so it would take the other file and say nothing.
    """
    given = get_args_parser().parse_known_args(arguments)[0].config_dir
    verl = getattr(find_spec("verl"), "submodule_search_locations", None) or ()
    for root in (CONF_DIR, *(Path(each) / "trainer" / "config" for each in verl)):
        for file in root.rglob("*.yaml") if given else ():
            own = Path(given) / file.relative_to(root)
            if own.is_file() and not own.samefile(file):
                raise fail("--config-dir", given, f"hydra takes {file} in place of {own}: give that file another name")


def check(config: DictConfig) -> NoReturn:
    """Print what the checks find and the plan; exit."""
    check_releases(config)
    from recipe.partial_rollout.tools.check.command import check_run

    sys.exit(check_run(config))


def run(config: DictConfig) -> None:
    """Check ``config``, start Ray, train.

    Raises:
        ConfigError: before Ray starts, in one line.
    """
    with ExitStack() as held:
        runner = begin(config, held)
        keep_output(runner.files.directory / OUTPUT)
        runner.train()


def begin(config: DictConfig, held: ExitStack) -> TaskRunner:
    """Check and complete ``config``, make the run's directory, and return the runner, whose ``train`` starts Ray.

    The directory stays locked while ``held`` is open.

    Raises:
        ConfigError: in one line.
    """
    check_releases(config)
    from recipe.partial_rollout import preflight

    found = preflight.checked(config)
    # Imported after the checks: these modules import verl's engine, which may need a package that the checks look for.
    from recipe.partial_rollout.rollout.run_files import CONFIG, RunFiles
    from recipe.partial_rollout.task_runner import TaskRunner
    from recipe.partial_rollout.training.trackers import LOG_DIR, set_variable

    if found.checkpoints is None:
        words = f"must be {V1_MODE} with trainer.use_v1=True; run_scripts/recipe.sh runs verl's own modes"
        raise fail("trainer.v1.trainer_mode", config.trainer.v1.trainer_mode, words)
    apply_overrides(config)
    files = RunFiles(found.checkpoints, trains=not config.trainer.get("val_only"))
    set_variable(LOG_DIR, str(files.directory.parent / "swanlog"))
    show_warnings()
    if files.trains:
        held.enter_context(locked(files.directory))
    # After the lock: it moves what another process may still be writing.
    files.begin()
    if files.trains:
        OmegaConf.save(config, files.directory / CONFIG, resolve=True)
    return TaskRunner(config, files, found)


def claim_directory(config: DictConfig, directories: set[str]) -> None:
    """Add the directory of a training to ``directories``, those of the earlier jobs of a multirun.

    Refuse a directory that is there: the job would resume the earlier one, instead of training with its own values.
    """
    key = "trainer.default_local_dir"
    if OmegaConf.select(config, "trainer.val_only"):
        return
    if (given := str(OmegaConf.select(config, key))) in directories:
        example = "'trainer.experiment_name=job${hydra:job.num}'"
        refuse(fail(key, given, f"another directory for each job of a multirun, as with {example}"))
    directories.add(given)


class _AboveProgressBar(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def spare_caches() -> None:
    """Point the caches of libraries at a temporary directory if the home or its cache cannot be written.

    Otherwise a library that cannot write its cache would end the run. Environment variables say so to this process and
    its children. Models of the hub, SwanLab's key and Ray's token are still read from the home.
    """
    # Without a home, expanduser returns "~".
    home = Path(os.path.expanduser("~"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(os.path.expanduser(os.environ.get("HF_HOME") or cache / "huggingface"))
    refused = [directory for directory in (home, cache, hub) if not (directory.is_absolute() and writable(directory))]
    if not refused:
        return
    spare = tempfile.mkdtemp(prefix="partial_rollout_caches_")
    say(f"{refused[0]} cannot be written: the caches of this run are in {spare}", error=True)
    if hub in refused:
        # Tables made of data files, and code that models bring.
        for part in ("datasets", "modules"):
            os.environ.setdefault(f"HF_{part.upper()}_CACHE", f"{spare}/{part}")
    if refused == [hub]:
        return
    if (cache / "huggingface").is_dir():
        os.environ.setdefault("HF_HOME", str(cache / "huggingface"))
    os.environ["XDG_CACHE_HOME"] = spare
    if home in refused:
        for variable in ("XDG_CONFIG_HOME", "TRITON_HOME", "FLASHINFER_WORKSPACE_BASE"):
            os.environ.setdefault(variable, spare)
        if not (home / ".swanlab").is_dir():
            os.environ.setdefault("SWANLAB_SAVE_DIR", spare)
        if not ((home / ".ray" / "auth_token").is_file() or os.environ.get("RAY_ADDRESS")):
            os.environ.setdefault("RAY_AUTH_TOKEN", uuid4().hex)


def show_warnings() -> None:
    """Let the recipe's warnings reach the terminal; a library that vLLM imports mutes the root logger below ERROR."""
    ours = logging.getLogger(_HERE)
    ours.setLevel(logging.WARNING)
    ours.handlers, ours.propagate = [_AboveProgressBar()], False


def in_one_line(program: Callable[[], None]) -> None:
    """Run ``program``.

    An error that it raises, of hydra or of a check, ends the process in one line with exit code 2.
    """
    # Otherwise hydra prints what it raises, in three lines, and exits with 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        program()
    except ConfigError as error:
        refuse(error)
    except Exception as error:
        from recipe.partial_rollout.preflight.verl_keys import of_hydra

        refuse(of_hydra(error))


def refuse(error: ConfigError) -> NoReturn:
    """Print the user's mistake ``error``, and end the process with exit code 2."""
    print(f"config error: {error}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Train, or check. A failure ends in one line on the terminal.

    Exit codes: 2 for a user's mistake, 1 for a training that failed, 128 + the signal's number for one that was
    stopped. The traceback of a failed training is in ``error.log`` of the run directory.
    """
    stop = StopSignals()
    with stop.in_force():
        try:
            _main()
        except KeyboardInterrupt:
            stop.end()


def _main() -> None:
    act = check if CHECK in sys.argv else run
    codes: list[Any] = []
    directories: set[str] = set()
    sys.argv = [argument for argument in sys.argv if argument != CHECK]

    @hydra.main(config_path=str(CONF_DIR), config_name="ppo_partial_rollout", version_base=None)
    def composed(config: DictConfig) -> None:
        try:
            claim_directory(config, directories)
            end_in_one_line(act, config)
        except SystemExit as end:
            # A multirun checks every job. A training that fails ends the whole multirun.
            if act is not check:
                raise
            codes.append(end.code)

    # Before hydra composes: libraries that it imports choose their caches then.
    spare_caches()
    in_one_line(lambda: check_releases_early(sys.argv))
    in_one_line(lambda: check_config_dir(sys.argv[1:]))
    in_one_line(composed)
    if failed := [code for code in codes if code]:
        sys.exit(failed[0])


def end_in_one_line(act: Callable[[DictConfig], None], config: DictConfig) -> None:
    """Call ``act``, which is ``check`` or ``run``.

    An error that it raises is printed in one line and ends the process.
    """
    try:
        with nullcontext() if _CONSOLE in (OmegaConf.select(config, "trainer.logger") or ()) else libraries_apart():
            act(config)
    except ConfigError as error:
        refuse(error)
    except StopTraining as stop:
        print(f"training stopped by {stop}", file=sys.stderr)
        sys.exit(stop.exit_code)
    except Exception as error:
        if act is check:
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"check failed: {one_line(error)} ({where.filename}:{where.lineno})", file=sys.stderr)
            sys.exit(1)
        log, text = Path(config.trainer.default_local_dir) / ERROR_LOG, traceback.format_exc()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            # What a sample raised may quote a lone surrogate.
            log.write_text(text, errors="backslashreplace")
        except OSError:
            # A full disk may be what ended the training.
            print(text, file=sys.stderr)
        output = log.with_name(OUTPUT)
        printed = f"; output of libraries: {output}" if output.exists() else ""
        print(f"training failed: {one_line(error)}\n(traceback: {log}{printed})", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
