"""What several layers of tests share: Ray nodes on this machine, and Megatron."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos.victim import kill_session, processes_of_session
from verl_ext.guard import enter_recipe

enter_recipe()

ROOT = Path(__file__).resolve().parents[1]
_START_S = 120
_STORE_BYTES = 200 * 2**20


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def megatron_path(tmp_path_factory):
    """PYTHONPATH of processes that can import Megatron.

    Where it is not installed, the pins of the extra ``megatron`` are, without dependencies, into a folder of the session.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if find_spec("mbridge") is None:
        site = str(tmp_path_factory.mktemp("site"))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
        subprocess.run([*pip, *project["optional-dependencies"]["megatron"]], check=True, timeout=300)
        paths.append(site)
    return ":".join(paths)


@pytest.fixture
def start_node():
    """``start_node(name, address=None, num_cpus=8, num_gpus=0)``: a Ray node, or a head without ``address``.

    It has ``address``, ``processes(title)``, ``freeze()`` and ``kill()``; the last two stop or end all its processes.
    Ray's files are in a short path of their own: under /tmp/ray other runs on this machine would find the node.
    """
    files, leaders = Path(tempfile.mkdtemp(prefix="r", dir="/tmp")), []

    def start(name, address=None, *, num_cpus=8, num_gpus=0):
        own = address is None
        address = address or f"127.0.0.1:{free_port()}"
        place = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
        place = place if own else [f"--address={address}"]
        command = [Path(sys.executable).with_name("ray"), "start", "--block", *place, f"--node-name={name}"]
        sizes = [f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}", f"--object-store-memory={_STORE_BYTES}"]
        log = files / f"{name}.log"
        with log.open("w") as output:
            leader = subprocess.Popen(
                [*command, *sizes, f"--temp-dir={files}", f"--dashboard-agent-listen-port={free_port()}"],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={"RAY_AUTH_MODE": "disabled", **os.environ},
            )
        leaders.append(leader)
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text():
            assert leader.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        return SimpleNamespace(
            name=name,
            address=address,
            processes=lambda title: processes_of_session(leader.pid, title),
            freeze=lambda: [process.suspend() for process in processes_of_session(leader.pid)],
            kill=lambda: kill_session(leader),
        )

    yield start
    # A node's children end by themselves once their raylet is gone; the head goes last.
    for leader in reversed(leaders):
        kill_session(leader)
    shutil.rmtree(files, ignore_errors=True)
