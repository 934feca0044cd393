"""This machine: a line each with its remedy, and what a run lacks on it; a GPU machine has an nvidia-smi."""

import contextlib
import os
import re
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import inputs, rules
from recipe.partial_rollout.preflight.inputs import PACKAGES, check_cluster, missing_packages
from recipe.partial_rollout.preflight.rules import check_rules
from recipe.partial_rollout.tools import verl_trainer
from recipe.partial_rollout.tools.check import machine
from recipe.partial_rollout.tools.check.machine import Finding, lacks
from recipe.partial_rollout.tools.check.memory import DeviceMemory, ModelSize, in_words
from verl_ext import command, guard, v1
from verl_ext.guard import CPU_PAIR, GPU_PAIR


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    """nvidia-smi is there, and nothing says cpu."""
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)


def test_device_is_what_torch_sees_and_else_why_it_sees_none(monkeypatch):
    def fail():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020). Update it")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert machine.device().stops
    assert "sees no GPU: RuntimeError: The NVIDIA driver on your system is too old" in str(machine.device())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    h100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: h100)
    assert str(machine.device()) == "ok    device          2 x NVIDIA H100 80GB HBM3, 79 GiB"


def test_tritons_compiler_and_pythons_header_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert machine.compiler().said == "no C compiler" and machine.compiler().stops
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Python.h: apt-get install python3." in str(machine.compiler()) and machine.compiler().stops
    (tmp_path / "Python.h").touch()
    assert str(machine.compiler()) == f"ok    compiler        {tmp_path}/gcc, {tmp_path}/Python.h"


def test_cpu_build_on_a_gpu_machine_is_refused_and_a_machine_without_gpus_is_asked_for_none(gpu_machine, monkeypatch):
    assert machine.wants_gpu()
    if torch.version.cuda is None:
        assert "sees no GPU: AssertionError: Torch not compiled with CUDA enabled" in str(machine.device())
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert not machine.wants_gpu()


def test_hub_that_does_not_answer_within_a_deadline_is_told_of(monkeypatch):
    def head(url, timeout):
        raise TimeoutError(f"late after {timeout} s")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    with pytest.raises(ConfigError, match=r"late after 5\.0 s"):
        inputs.check_model("nobody/nothing")


@pytest.mark.parametrize(("stops", "code"), [(False, 0), (True, 3)])
def test_exit_code_says_whether_a_run_can_start(monkeypatch, capsys, stops, code):
    found = [Finding("versions", "fine"), Finding("device", "old", "renew it", stops=stops), Finding("disk", "large")]
    monkeypatch.setattr(machine, "findings", lambda: iter(found))
    assert command.main(["check"]) == code
    assert len(capsys.readouterr().out.splitlines()) == 3


# -- what a run lacks --------------------------------------------------------------------------------------------------


ROOT = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = ("partial_rollout.placement=separate", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4")
KEEP = ("partial_rollout.resume_kv=keep", f"{ROLLOUT}.free_cache_engine=False", f"{ROLLOUT}.enable_prefix_caching=True")
PADDED = "actor_rollout_ref.model.use_remove_padding=False"
PRESENT = ModuleSpec("package", None)
DISTRIBUTIONS = {"cupy": "cupy-cuda13x", "transfer_queue": "transferqueue"}


@pytest.fixture
def build(resolved_config):
    return lambda *overrides, name="recipe": resolved_config(name, *overrides)


def problems(config, *arguments):
    return [str(error) for error in lacks(config, *arguments)]


@pytest.fixture(scope="module")
def model_4b(tmp_path_factory):
    """The config of Qwen3-4B, with a file in place of its weights."""
    sizes = {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151_936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
    path = tmp_path_factory.mktemp("models") / "any name"
    Qwen3Config(**sizes, **heads).save_pretrained(path)
    (path / "model.safetensors").touch()
    return f"actor_rollout_ref.model.path='{path}'"


SIZE_4B = ModelSize(4_022_468_096, 4_022_468_096, 151_936)


@pytest.fixture
def looks_like_a_gpu(monkeypatch):
    """This machine has a GPU, by its looks, and no Ray cluster is named."""
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine, "wants_gpu", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("overrides", "module"),
    [
        ((), None),
        ((*SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=shm"), None),
        (SEPARATE, "cupy"),
        (("arm=colocate_async",), "transfer_queue"),
        (("trainer.use_v1=True",), "transfer_queue"),
        (("engine=megatron",), "megatron"),
        ((f"{ROLLOUT}.trace.backend=mlflow",), "mlflow"),
        (("arm=nopr", f"{ROLLOUT}.name=sglang"), "sglang"),
    ],
)
def test_what_a_command_imports_is_asked_for_with_the_command_that_brings_it(build, monkeypatch, overrides, module):
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    found = list(map(str, missing_packages(build(*overrides))))
    assert len(found) == (module is not None)
    commands = {"megatron": "pip install -e '.[megatron]'"} | {
        name: f"pip install {name}" for name in ("mlflow", "sglang")
    }
    brings = commands.get(module, "PARTIAL_ROLLOUT_EXTRA=gpu")
    words = f"the package {module}, which is not installed, or hidden by a folder ./{module}: `{brings}"
    assert all(words in line for line in found)
    monkeypatch.setattr(inputs, "find_spec", lambda name: PRESENT)
    assert not list(missing_packages(build(*overrides)))


@pytest.mark.parametrize(("tracker", "files"), [("wandb", []), ("swanlab", ["__init__.py"]), ("trackio", ["run.db"])])
def test_trackers_folder_in_the_working_directory_is_no_package(build, monkeypatch, tmp_path, tracker, files):
    """Python takes it for one: a run would fail at the tracker's first call, with its engines up."""
    (tmp_path / tracker).mkdir()
    for name in files:
        (tmp_path / tracker / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]) or PRESENT)
    (refused,) = map(str, missing_packages(build(f"trainer.logger=[file,{tracker}]")))
    assert refused.startswith(
        f"trainer.logger={tracker}: another, or the package {tracker}, which is not installed, or"
    )
    assert f"./{tracker}" in refused
    assert not list(missing_packages(build("trainer.logger=[file]")))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model-00001-of-00002.bin", None])
def test_model_folder_without_weights_is_refused(tmp_path, file):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    if file:
        (tmp_path / file).touch()
    words = "actor_rollout_ref.model.path=.*: a model directory with weights, .*which this one lacks"
    with contextlib.nullcontext() if file else pytest.raises(ConfigError, match=words):
        inputs.check_model(str(tmp_path))


def test_verls_own_trainer_runs_the_configs_of_this_repository_once_they_are_checked(build, monkeypatch):
    """As the arms of a study do, whose configs have partial rollout on."""
    ran, seen = [], []
    monkeypatch.setattr(verl_trainer.preflight, "checked", lambda config: seen.append(config.partial_rollout.enable))
    monkeypatch.setattr(verl_trainer.verls, "run_ppo", lambda config, **_: ran.append(config))
    verl_trainer.main.__wrapped__(build("trainer.use_v1=True", "trainer.v1.trainer_mode=colocate_async"))
    (config,) = ran
    assert (seen, config.partial_rollout.enable) == ([False], False)


@pytest.mark.parametrize(
    ("lacks", "line"),
    [
        ("actor_rollout_ref.model.path=/nowhere", "actor_rollout_ref.model.path=/nowhere: a local model"),
        ("transfer_queue", "trainer.use_v1=True: another, or the package transfer_queue"),
    ],
)
def test_verls_own_trainer_does_not_start_without_model_or_queue(build, monkeypatch, capsys, lacks, line):
    monkeypatch.setattr(verl_trainer.preflight, "check_device", lambda config: None)
    monkeypatch.setattr(inputs, "find_spec", lambda name: None if name == lacks else PRESENT)
    monkeypatch.setattr(verl_trainer.verls, "run_ppo", lambda config, **_: pytest.fail("it has started"))
    with pytest.raises(SystemExit) as end:
        verl_trainer.main.__wrapped__(build("arm=colocate_async", *[lacks] * ("=" in lacks)))
    (error,) = [each for each in capsys.readouterr().err.splitlines() if not each.startswith("warning")]
    assert end.value.code == 2 and error.startswith(f"config error: {line}")


def test_another_release_of_the_queue_is_refused(monkeypatch):
    """The deadline of its clients is a patch of one release; verl takes any from 0.1.10 on."""
    monkeypatch.setattr(guard, "installed", lambda package: "0.1.12")
    with pytest.raises(guard.UnsupportedVersionError, match=r"bound_controller is written for TransferQueue==0\.1\.11"):
        v1.bound_controller(SimpleNamespace())


def test_packages_that_the_gpu_set_brings_are_in_its_lock():
    locked = re.findall(r"^([\w.-]+)==", (ROOT / "requirements-gpu.txt").read_text(), re.M)
    ours = {DISTRIBUTIONS[module] for module, _, _, brought_by in PACKAGES if brought_by == inputs.INSTALL_GPU}
    assert len(ours) == 2 and ours <= set(locked)


def test_verl_still_needs_the_package_where_the_map_says_so():
    import verl.checkpoint_engine
    import verl.trainer.main_ppo

    modules = {key: module for module, key, _, _ in PACKAGES}
    nccl = Path(verl.checkpoint_engine.__file__).with_name("nccl_checkpoint_engine.py").read_text()
    trainer = Path(verl.trainer.main_ppo.__file__).read_text()
    backend = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    assert f"import {modules[backend]}" in nccl and f"import {modules['trainer.use_v1']}" in trainer


@pytest.mark.parametrize(
    ("overrides", "needed"),
    # v1: TransferQueue's controller and its 8 storage units have one each
    [((), 25), (("trainer.n_gpus_per_node=4", *SEPARATE), 21), (("trainer.use_v1=True",), 34)],
)
def test_ray_needs_three_cpus_a_trainer_two_an_engine_and_one(build, overrides, needed):
    config = build("experiment=gsm8k_8gpu_4b", *overrides)
    check_cluster(config, {"CPU": needed, "GPU": 99})
    with pytest.raises(ConfigError, match=f"{needed} CPUs for Ray, which has {needed - 1}"):
        check_cluster(config, {"CPU": needed - 1, "GPU": 99})


def test_run_is_refused_where_it_would_wait_for_cpus_or_fill_the_disk(build, looks_like_a_gpu, monkeypatch, tmp_path):
    config = build("experiment=gsm8k_8gpu_4b", f"recipe.out={tmp_path}/out")
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: OmegaConf.create({"free": 100 * 2**30}))
    cpus, disk = problems(config, SIZE_4B)
    assert "25 CPUs for Ray, which has 16" in cpus
    assert f"100 GiB free for trainer.default_local_dir={tmp_path}/out/pr: 135 GiB for 3 checkpoints of 45.0" in disk
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    config.trainer.save_freq = -1
    assert not problems(config, SIZE_4B)


def test_run_is_refused_on_a_device_that_the_machines_check_refuses(build, looks_like_a_gpu, monkeypatch):
    found = [Finding("device", "driver 535", "a newer one", stops=True), Finding("attention", "sdpa", "flash-attn")]
    monkeypatch.setattr(machine, "wants_gpu", lambda: True)
    monkeypatch.setattr(machine, "device", lambda: found[0])
    monkeypatch.setattr(machine, "compiler", lambda: found[1])
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    assert problems(build(), None) == ["FAIL  device          driver 535: a newer one"]
    assert not problems(build("platform=cpu"), None)


def test_machine_without_a_gpu_says_that_it_compares_nothing(build, looks_like_a_gpu, monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    (said,) = problems(build("trainer.nnodes=1"), None)
    assert said.startswith("note  device          this machine has no GPU to compare with: ")


@pytest.mark.parametrize("elsewhere", ["address", "nodes"])
def test_machine_that_will_not_train_is_not_asked(build, looks_like_a_gpu, monkeypatch, elsewhere):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 1)
    if elsewhere == "address":
        monkeypatch.setenv("RAY_ADDRESS", "auto")
    config = build("trainer.nnodes=2" if elsewhere == "nodes" else "trainer.nnodes=1")
    assert not problems(config, None)


FSDP = "actor_rollout_ref.actor.fsdp_config"
LORA = ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=all-linear")
GPUS = "trainer.n_gpus_per_node={}".format


def test_size_is_read_from_the_models_own_config_with_adapters_apart(build, model_4b):
    assert ModelSize.of(build(model_4b)) == SIZE_4B
    lora = ModelSize.of(build(model_4b, *LORA))
    # Rank 32, in and out of each of seven matrices a layer.
    assert lora.trained == 36 * 32 * ((2560 + 4096) * 2 + (2560 + 1024) * 2 + (2560 + 9728) * 3)
    assert lora.parameters == SIZE_4B.parameters + lora.trained
    assert ModelSize.of(build("actor_rollout_ref.model.path=/nowhere")) is None


@pytest.mark.parametrize(
    ("overrides", "moment", "addends"),
    [
        ((), "update", {"weights": 7.5, "gradients": 7.5, "Adam": 15.0}),
        ((), "wake", {"engine": 56.0, "weights": 7.5, "Adam": 15.0}),
        ((GPUS(8),), "wake", {"engine": 56.0, "weights": 1.9, "Adam": 3.7}),
        # The shards of two devices each, whole on every pair.
        ((GPUS(8), f"{FSDP}.fsdp_size=2"), "wake", {"engine": 56.0, "weights": 7.5, "Adam": 15.0}),
        ((f"{FSDP}.model_dtype=bf16",), "wake", {"engine": 56.0, "weights": 3.7, "Adam": 7.5}),
        # Offloaded state is on the device at the update, and not when the engine wakes.
        ((f"{FSDP}.optimizer_offload=True",), "update", {"weights": 7.5, "gradients": 7.5, "Adam": 15.0}),
        ((f"{FSDP}.optimizer_offload=True",), "wake", {"engine": 56.0, "weights": 7.5}),
        ((f"{FSDP}.param_offload=True",), "wake", {"engine": 56.0, "Adam": 15.0}),
        ((f"{FSDP}.offload_policy=True",), "update", {"weights": 0.0, "gradients": 0.0, "Adam": 0.0}),
        (LORA, "update", {"weights": 7.6, "gradients": 0.1, "Adam": 0.2}),
        # vLLM's share is of the whole device, however many hold a replica.
        ((f"{ROLLOUT}.tensor_model_parallel_size=2",), "wake", {"engine": 56.0}),
        ((f"{ROLLOUT}.gpu_memory_utilization=0.5",), "wake", {"engine": 40.0}),
        ((GPUS(8), *KEEP), "update", {"engine": 56.0, "weights": 1.9}),
        (SEPARATE, "wake", {}),
    ],
)
def test_sums_follow_verls_keys(build, model_4b, overrides, moment, addends):
    config = build("experiment=gsm8k_8gpu_4b", model_4b, GPUS(2), *overrides)
    found = getattr(DeviceMemory.of(config, ModelSize.of(config)), moment)
    assert {name: round(found[name], 1) for name in addends} == addends
    gone = {"param": "weights", "optimizer": "Adam"}
    for key, name in gone.items():
        if f"{FSDP}.{key}_offload=True" in overrides and moment == "wake":
            assert name not in found
    assert bool(found) == bool(addends)


def test_page_shows_what_a_check_prints_and_sizes_that_it_accepts(build, model_4b):
    page = (ROOT / "docs" / "gpu.md").read_text()
    config = build("experiment=gsm8k_8gpu_4b", model_4b)
    memory = DeviceMemory.of(config, ModelSize.of(config))
    lines = [Finding(name, in_words(getattr(memory, name), 80)) for name in ("update", "wake")]
    lines.append(Finding("missing", str(next(inputs.missing_inputs(config))), stops=True))
    assert "\n".join(map(str, lines)) in page
    (sizes,) = re.findall(r"^trainer\.n_gpus_per_node=8 .*$", page, re.M)
    assert not list(check_rules(build(*sizes.split(), name="own_job")))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*KEEP,), r"gpu_memory_utilization=0.7: at most 0.66, or rollout.free_cache_engine=True: an update takes "),
        ((*KEEP, PADDED), r"gpu_memory_utilization=0.7: at most 0.6, or"),
        ((*KEEP, f"{ROLLOUT}.gpu_memory_utilization=0.35"), None),
        ((), None),
        ((GPUS(2), f"{ROLLOUT}.gpu_memory_utilization=0.5"), None),
        (
            (GPUS(1), "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768"),
            r"ppo_max_token_len_per_gpu=32768: fewer tokens, more devices, or actor.fsdp",
        ),
        (
            (GPUS(2),),
            r"gpu_memory_utilization=0.7: at most 0.69, or actor.fsdp_config.optimizer_offload=True: when the engine wakes "
            r"it takes 80.5 GiB of 80 a device \(engine 56.0, weights 7.5, Adam 15.0, CUDA and NCCL 2.0\)",
        ),
    ],
    ids=["engine awake", "padded logits", "smaller engine", "eight", "two", "update alone", "engine that wakes"],
)
def test_update_and_waking_engine_must_fit_a_device(build, overrides, message):
    config = build("experiment=gsm8k_8gpu_4b", *overrides)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        DeviceMemory.of(config, SIZE_4B).check(config)


@pytest.mark.parametrize(
    ("pair", "method", "stops"),
    [(GPU_PAIR, "eagle3", True), (GPU_PAIR, "mtp", True), (GPU_PAIR, "ngram", False), (CPU_PAIR, "eagle", False)],
)
def test_drafts_that_kill_the_engine_of_this_vllm_are_refused(build, monkeypatch, pair, method, stops):
    monkeypatch.setattr(rules, "installed_pair", lambda: pair)
    config = build(f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config.method={method}")
    found = list(map(str, check_rules(config)))
    words = f"speculative_config.method={method}: null or ngram with vLLM 0.24.0"
    assert [words in line for line in found] == [True] * stops
