"""This machine: a line each, with its remedy where one is needed; a GPU machine is played by an nvidia-smi on the PATH."""

import os
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch

from recipe.partial_rollout.tools.check import machine
from recipe.partial_rollout.tools.check.machine import Finding
from verl_ext import command
from verl_ext.guard import CPU_PAIR, GPU_PAIR

OLD, NEW = "535.104.05", "580.65.06"


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    """``gpu_machine(driver, visible=, cuda=)``: nvidia-smi lists one H100, and torch was built with ``cuda``."""

    def build(driver=NEW, *, visible=False, cuda="13.0", lines=1):
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\n" + f'echo "NVIDIA H100 80GB HBM3, {driver}, 81559 MiB"\n' * lines)
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: visible)
        monkeypatch.setattr(torch.version, "cuda", cuda)

    return build


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"visible": True}, "ok    device          1 x NVIDIA H100 80GB HBM3, 81559 MiB, driver 580.65.06"),
        ({"driver": OLD}, "sees none: CUDA 13.0 needs driver 580 or newer"),
        ({"cuda": None}, "sees none: this torch is built without CUDA; PARTIAL_ROLLOUT_EXTRA=gpu bash"),
        ({}, "sees none: set CUDA_VISIBLE_DEVICES to a device that is there"),
        ({"lines": 0}, "FAIL  device          nvidia-smi lists no GPU: give this machine or container one"),
    ],
)
def test_device_is_what_torch_sees_of_what_nvidia_smi_lists(gpu_machine, made, said):
    gpu_machine(**made)
    found = machine.device(machine.gpus())
    assert said in str(found) and found.stops == (not made.get("visible"))


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


def test_cpu_builds_on_a_gpu_machine_are_refused_and_a_machine_without_gpus_is_asked_for_none(gpu_machine, monkeypatch):
    gpu_machine()
    monkeypatch.setattr(machine, "installed_pair", lambda: CPU_PAIR)
    assert str(machine.versions()).endswith("is tested; PARTIAL_ROLLOUT_EXTRA=gpu bash run_scripts/setup.sh")
    monkeypatch.setattr(machine, "installed_pair", lambda: GPU_PAIR)
    assert not machine.versions().stops and not machine.versions().remedy
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert not machine.wants_gpu()
    assert str(machine.engine()).startswith("ok    engine          model runner V1, synchronous scheduling")


@pytest.mark.parametrize(("have", "devices", "sign"), [(2, 0, "ok"), (25, 8, "ok"), (24, 8, "note"), (3, 1, "FAIL")])
def test_cpus_are_counted_as_ray_reserves_them(monkeypatch, have, devices, sign):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: have)
    line = str(machine.cpus(devices))
    assert line.startswith(f"{sign} ") and (sign != "note" or "25 CPUs, or train on 7 (GPUS_PER_NODE=7)" in line)


def test_hub_that_is_not_reached_within_a_deadline_is_a_note(monkeypatch):
    def head(url, timeout):
        raise TimeoutError(f"late after {timeout} s")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    assert str(machine.hub()).startswith("note ") and "late after 5.0 s" in str(machine.hub())


@pytest.mark.parametrize(("stops", "code"), [(False, 0), (True, 3)])
def test_exit_code_says_whether_a_run_can_start(monkeypatch, capsys, stops, code):
    found = [Finding("versions", "fine"), Finding("device", "old", "renew it", stops=stops), Finding("hub", "answers")]
    monkeypatch.setattr(machine, "findings", lambda: iter(found))
    assert command.main(["check"]) == code
    assert len(capsys.readouterr().out.splitlines()) == 3
