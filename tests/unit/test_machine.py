"""This machine: a line each with its remedy, and what a run lacks on it; a GPU machine has an nvidia-smi."""

import contextlib
import re
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import inputs
from recipe.partial_rollout.preflight.inputs import check_cluster, missing_packages
from recipe.partial_rollout.preflight.rules import check_rules
from recipe.partial_rollout.tools import verl_trainer
from recipe.partial_rollout.tools.check import machine
from recipe.partial_rollout.tools.check.machine import Finding, lacks
from recipe.partial_rollout.tools.check.memory import DeviceMemory, ModelSize, in_words


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


ROOT = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
SEPARATE = ("partial_rollout.placement=separate", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4")
KEEP = ("partial_rollout.resume_kv=keep", f"{ROLLOUT}.free_cache_engine=False", f"{ROLLOUT}.enable_prefix_caching=True")
PRESENT = ModuleSpec("package", None)


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


NEEDED = {"cupy", "transfer_queue", "megatron", "mlflow"}
"""packages that some setting needs, at least: the test below takes its rows from the table itself"""


@pytest.mark.parametrize(("module", "key", "value", "command"), inputs.PACKAGES)
def test_missing_package_is_named_with_the_command_that_brings_it(build, monkeypatch, module, key, value, command):
    assert {row[0] for row in inputs.PACKAGES} >= NEEDED
    config = build()
    assert not list(missing_packages(config))
    # It raises where there is no such key.
    OmegaConf.update(config, key, value)
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    (found,) = map(str, missing_packages(config))
    assert (
        f"the package {module}, which is not installed, or is hidden by a folder ./{module}: `{command}` inst" in found
    )
    monkeypatch.setattr(inputs, "find_spec", lambda name: PRESENT)
    assert not list(missing_packages(config))


@pytest.mark.parametrize(("tracker", "file"), [("wandb", "run.db"), ("swanlab", "__init__.py")])
def test_trackers_folder_in_the_working_directory_is_no_package(build, monkeypatch, tmp_path, tracker, file):
    """Python takes it for one: a run would fail at the tracker's first call, with its engines up."""
    (tmp_path / tracker).mkdir()
    (tmp_path / tracker / file).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]) or PRESENT)
    (refused,) = map(str, missing_packages(build(f"trainer.logger=[file,{tracker}]")))
    assert refused.startswith(f"trainer.logger={tracker}: another value, or the package {tracker}, which is not")
    assert not list(missing_packages(build("trainer.logger=[file]")))


def test_model_folder_without_weights_is_refused(tmp_path):
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
    words = "actor_rollout_ref.model.path=.*: a model directory with weights .*; this one has none"
    with pytest.raises(ConfigError, match=words):
        inputs.check_model(str(tmp_path))
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    inputs.check_model(str(tmp_path))


def test_verls_own_trainer_runs_our_configs_once_they_are_checked(build, monkeypatch, capsys):
    """As the arms of a study do, whose configs have partial rollout on."""
    ran = []
    monkeypatch.setattr(verl_trainer.preflight, "check_device", lambda config: None)
    monkeypatch.setattr(inputs, "find_spec", lambda name: None if name == "transfer_queue" else PRESENT)
    monkeypatch.setattr(verl_trainer.verls, "run_ppo", lambda config, **_: ran.append(config.partial_rollout.enable))
    with pytest.raises(SystemExit) as end:
        verl_trainer.main.__wrapped__(build("arm=colocate_async"))
    said = "config error: trainer.use_v1=True: another value, or the package transfer_queue"
    assert end.value.code == 2 and said in capsys.readouterr().err
    monkeypatch.setattr(verl_trainer.preflight, "checked", lambda config: None)
    verl_trainer.main.__wrapped__(build("arm=colocate_async"))
    assert ran == [False]


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
    free = f"100 GiB free for trainer.default_local_dir={tmp_path}/out/pr"
    assert f"{free}: 135 GiB are needed for 3 checkpoints of 45.0" in disk
    # verl's own "no limit" is any number below 1.
    config.trainer.max_actor_ckpt_to_keep = -1
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: OmegaConf.create({"free": 80 * 2**30}))
    assert "90 GiB are needed for 2 checkpoints" in problems(config, SIZE_4B)[1]
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    config.trainer.save_freq = -1
    assert not problems(config, SIZE_4B)


def test_machines_own_findings_count_where_the_run_will_train(build, looks_like_a_gpu, monkeypatch):
    monkeypatch.setattr(machine, "wants_gpu", lambda: True)
    monkeypatch.setattr(machine, "device", lambda: Finding("device", "driver 535", "a newer one", stops=True))
    monkeypatch.setattr(machine, "compiler", lambda: Finding("compiler", "gcc", "clang"))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    assert problems(build(), None) == ["FAIL  device          driver 535: a newer one"]
    assert not problems(build("platform=cpu"), None)
    monkeypatch.setattr(machine, "wants_gpu", lambda: False)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 1)
    assert not problems(build("trainer.nnodes=2"), None), "other machines train"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not problems(build(), None)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    (said,) = problems(build(), None)
    assert said.startswith(
        "note  device          this machine has no GPU, so its CPUs and disk are not checked either:"
    )


FSDP, BUDGET = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
LORA = ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=all-linear")
GPUS = "trainer.n_gpus_per_node={}".format


def test_size_is_read_from_the_models_own_config_with_adapters_apart(build, model_4b):
    assert ModelSize.of(build(model_4b)) == SIZE_4B
    lora = ModelSize.of(build(model_4b, *LORA))
    # Rank 32, in and out of each of seven matrices a layer.
    assert lora.trained == 36 * 32 * ((2560 + 4096) * 2 + (2560 + 1024) * 2 + (2560 + 9728) * 3)
    assert lora.parameters == SIZE_4B.parameters + lora.trained
    assert ModelSize.of(build(model_4b, "engine=megatron", "actor_rollout_ref.model.lora.rank=32")) == lora
    assert ModelSize.of(build("actor_rollout_ref.model.path=/nowhere")) is None


@pytest.mark.parametrize(
    ("overrides", "moment", "addends"),
    [
        ((), "update", {"weights": 7.5, "gradients": 7.5, "Adam": 15.0}),
        # The shards of two devices each, whole on every pair.
        ((GPUS(8), f"{FSDP}.fsdp_size=2"), "wake", {"engine": 56.0, "weights": 7.5, "Adam": 15.0}),
        # Offloaded state is on the device at the update, and not when the engine wakes.
        ((f"{FSDP}.optimizer_offload=True",), "wake", {"engine": 56.0, "weights": 7.5, "Adam": 0.0}),
        ((f"{FSDP}.offload_policy=True",), "update", {"weights": 0.0, "gradients": 0.0, "Adam": 0.0}),
        # vLLM's share is of the whole device, however many hold a replica.
        ((f"{ROLLOUT}.tensor_model_parallel_size=2",), "wake", {"engine": 56.0}),
        ((GPUS(8), *KEEP), "update", {"engine": 56.0, "weights": 1.9}),
        (SEPARATE, "wake", {}),
    ],
)
def test_sums_follow_verls_keys(build, model_4b, overrides, moment, addends):
    config = build("experiment=gsm8k_8gpu_4b", model_4b, GPUS(2), *overrides)
    found = getattr(DeviceMemory.of(config, ModelSize.of(config)), moment)
    assert {name: round(found.get(name, 0.0), 1) for name in addends} == addends and bool(found) == bool(addends)


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
        (KEEP, r"=0.7: at most 0.66, or actor_rollout_ref.rollout.free_cache_engine=True: an update "),
        ((*KEEP, f"{ROLLOUT}.gpu_memory_utilization=0.35"), None),
        ((GPUS(2), f"{ROLLOUT}.gpu_memory_utilization=0.5"), None),
        ((GPUS(1), f"{BUDGET}=32768"), rf"{BUDGET}=32768: fewer tokens, more devices, or {FSDP}"),
        (
            (GPUS(2),),
            rf"gpu_memory_utilization=0.7: at most 0.69, or {FSDP}.optimizer_offload=True: when the engine wakes "
            r"it takes 80.5 GiB of 80 a device \(engine 56.0, weights 7.5, Adam 15.0, CUDA and NCCL 2.0\)",
        ),
    ],
)
def test_update_and_waking_engine_must_fit_a_device(build, overrides, message):
    config = build("experiment=gsm8k_8gpu_4b", *overrides)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        DeviceMemory.of(config, SIZE_4B).check(config)
