"""A run joins the Ray that it is given, and says which node died."""

import contextlib
import socket
import time

import pytest
from omegaconf import OmegaConf
from verl.single_controller.ray import RayWorkerGroup

from recipe.partial_rollout import task_runner
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.rollout import cluster_nodes
from recipe.partial_rollout.rollout.cluster_nodes import ClusterNodes, NodeLostError
from recipe.partial_rollout.waits import one_line
from verl_ext import master_port


def node(name, *, alive=True, reason="", port=7001):
    place = {"NodeManagerAddress": "10.0.0.2", "NodeManagerPort": port}
    return {"NodeID": f"id-{name}", "NodeName": name, **place, "Alive": alive, "DeathReasonMessage": reason}


FIRST, SECOND, MUTE = node("first"), node("second"), node("second", port=7002)
DEAD = node("second", alive=False, reason="missing too many\nheartbeats")


def nodes_of(monkeypatch, *tables):
    """``ClusterNodes`` that sees each of ``tables`` once, the last one ever after; port 7002 does not answer."""
    left = list(tables)

    def table():
        if left[0] is None:
            raise ConnectionError("the head is gone")
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(cluster_nodes.ray, "nodes", table)
    monkeypatch.setattr(cluster_nodes, "accepts", lambda address, port: port != 7002)
    nodes = ClusterNodes()
    nodes.outlive()
    return nodes


@pytest.mark.parametrize(
    ("tables", "lost"),
    [
        ([[FIRST, SECOND], [FIRST, DEAD]], "Ray lost node second (10.0.0.2): missing too many heartbeats"),
        ([[FIRST, MUTE]], "Ray lost node second (10.0.0.2): its raylet does not answer"),
        ([[node("10.0.0.2")], [node("10.0.0.2", alive=False)]], "Ray lost node 10.0.0.2: Ray gives no reason"),
        # A failure on living nodes keeps its own words, as one beside a node that was dead before the run.
        ([[FIRST, DEAD]], None),
        # Ray no longer answers.
        ([[FIRST], None], None),
    ],
)
def test_failure_after_a_nodes_death_names_the_node_and_how_to_resume(monkeypatch, tables, lost):
    nodes = nodes_of(monkeypatch, *tables)
    with pytest.raises(NodeLostError) if lost else contextlib.nullcontext() as caught:
        nodes.blame(RuntimeError("the actor died\nunexpectedly"), "resume like this")
    if lost:
        end = ". The run ends with RuntimeError: unexpectedly; resume like this"
        assert one_line(caught.value) == f"NodeLostError: {lost}{end}"
        nodes.outlive()
        # A death that Ray knows is blamed once.
        with pytest.raises(NodeLostError) if MUTE in tables[-1] else contextlib.nullcontext():
            nodes.blame(RuntimeError("another"), "resume")


@pytest.mark.parametrize(
    ("ray_address", "options", "given"),
    [
        # The cluster that it joins keeps its own resources.
        ("10.0.0.1:6379", {"num_cpus": 32, "num_gpus": 1, "log_to_driver": False}, {"log_to_driver": False}),
        (None, {"num_cpus": 4, "address": "auto"}, {"address": "auto"}),
        # It sizes its Ray, and joins no other by chance.
        (None, {"num_cpus": 4}, {"address": "local", "num_cpus": 4}),
        ("local", {"num_cpus": 4}, {"address": "local", "num_cpus": 4}),
        # Without sizes it finds its Ray as verl does.
        (None, {"num_cpus": None}, {"num_cpus": None}),
    ],
)
def test_run_joins_the_ray_that_it_is_given_or_starts_its_own(monkeypatch, capsys, ray_address, options, given):
    asked = {}
    monkeypatch.setattr(task_runner.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(task_runner.ray, "init", lambda **kwargs: asked.update(kwargs))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray_address is not None:
        monkeypatch.setenv("RAY_ADDRESS", ray_address)
    task_runner.start_ray(OmegaConf.create({"ray_kwargs": {"ray_init": options}}))
    del asked["runtime_env"]
    assert asked == given and ("10.0.0.1:6379" in capsys.readouterr().out) == (ray_address == "10.0.0.1:6379")


@pytest.mark.parametrize(
    ("ray_address", "address", "refused"),
    [
        ("127.0.0.1:1", None, "RAY_ADDRESS=127.0.0.1:1: "),
        ("127.0.0.1:1", "auto", "RAY_ADDRESS=127.0.0.1:1: "),
        (None, "127.0.0.1:1", "ray_kwargs.ray_init.address=127.0.0.1:1: "),
        ("127.0.0.1:1", "local", None),
        (None, "ray://127.0.0.1:1", "ray_kwargs.ray_init.address=ray://127.0.0.1:1: "),
        (None, "auto", "ray_kwargs.ray_init.address=auto: "),
        ("head", None, "RAY_ADDRESS=head: "),
        ("head:port", None, "RAY_ADDRESS=head:port: "),
        (None, None, None),
        ("127.0.0.1:{open}", None, None),
        (None, "ray://127.0.0.1:{open}", None),
    ],
)
def test_ray_that_does_not_answer_is_refused_by_its_key_within_seconds(
    monkeypatch, tmp_path, ray_address, address, refused
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(task_runner.services, "find_gcs_addresses", set)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if ray_address is not None:
            monkeypatch.setenv("RAY_ADDRESS", ray_address.format(open=port))
        options = {"address": address and address.format(open=port), "_temp_dir": str(tmp_path)}
        config, began = OmegaConf.create({"ray_kwargs": {"ray_init": options}}), time.monotonic()
        with pytest.raises(ConfigError) if refused else contextlib.nullcontext() as caught:
            task_runner.check_ray_address(config)
    if refused:
        assert str(caught.value).startswith(f"{refused}HOST:PORT of a Ray") and "\n" not in str(caught.value)
        assert time.monotonic() < began + 10


def test_trainers_rendezvous_port_is_one_that_the_kernel_does_not_hand_out(tmp_path):
    file = tmp_path / "range"
    file.write_text("20000\t60999\n")
    first, end = master_port.master_port_range(file)
    assert 10_000 <= first < end <= 20_000
    assert master_port.master_port_range(tmp_path / "none")[1] <= 32768
    for told, expected in (({}, range(10_000, 65_535)), ({"master_port_range": [1, 2]}, [1])):
        group = RayWorkerGroup(worker_handles=["a worker"], **told)
        assert group._ray_master_port_range[0] in expected
