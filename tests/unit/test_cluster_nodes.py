"""A run joins the Ray that it is given, and says which node died."""

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import task_runner
from recipe.partial_rollout.rollout.cluster_nodes import ClusterNodes, NodeLostError
from recipe.partial_rollout.waits import one_line


def node(name, *, alive=True, reason="", address="10.0.0.2", port=7001):
    return {
        "NodeID": f"id-{name}",
        "NodeName": name,
        "NodeManagerAddress": address,
        "NodeManagerPort": port,
        "Alive": alive,
        "DeathReasonMessage": reason,
    }


def nodes_of(*tables, answers=lambda address, port: True):
    """``ClusterNodes`` that sees each of ``tables`` once, the last one ever after."""
    left = list(tables)
    return ClusterNodes(table=lambda: left.pop(0) if len(left) > 1 else left[0], answers=answers)


def test_node_that_died_meanwhile_is_named_with_its_reason():
    dead = node("second", alive=False, reason="health check failed due to missing too many heartbeats")
    nodes = nodes_of([node("first"), node("second")], [node("first"), dead])
    assert nodes.lost() == ["second (10.0.0.2): health check failed due to missing too many heartbeats"]


def test_node_that_no_longer_answers_is_lost_before_ray_notices():
    nodes = nodes_of([node("first"), node("second", port=7002)], answers=lambda address, port: port != 7002)
    assert nodes.lost() == ["second (10.0.0.2): its raylet does not answer"]


def test_node_that_was_dead_before_the_run_is_not_blamed():
    nodes = nodes_of([node("first"), node("old", alive=False, reason="terminated")])
    assert nodes.lost() == []


def test_node_whose_death_was_outlived_is_not_blamed_for_a_later_failure():
    died = [node("first"), node("third", alive=False, reason="power")]
    nodes = nodes_of([node("first"), node("third")], died, died)
    assert nodes.lost() == ["third (10.0.0.2): power"]
    nodes.outlive()
    assert nodes.lost() == []


def test_node_named_by_its_address_is_named_once():
    nodes = nodes_of([node("10.0.0.2")], [node("10.0.0.2", alive=False)])
    assert nodes.lost() == ["10.0.0.2: Ray gives no reason"]


def test_failure_after_a_nodes_death_names_the_node_and_how_to_resume():
    nodes = nodes_of([node("second")], [node("second", alive=False, reason="expected\ntermination")])
    with pytest.raises(NodeLostError) as caught:
        nodes.blame(RuntimeError("the actor died\nunexpectedly"), "resume like this")
    assert one_line(caught.value) == (
        "NodeLostError: Ray lost node second (10.0.0.2): expected termination. "
        "The run ends with RuntimeError: unexpectedly; resume like this"
    )


def test_failure_on_living_nodes_keeps_its_own_words():
    nodes_of([node("first")]).blame(RuntimeError("no reward"), "resume like this")


def test_ray_that_no_longer_answers_hides_no_failure():
    def fails():
        raise ConnectionError("the head is gone")

    seen = [lambda: [node("first")], fails]
    nodes = ClusterNodes(table=lambda: seen.pop(0)(), answers=lambda address, port: True)
    assert nodes.lost() == []


def ray_options(monkeypatch, ray_address, **options):
    """What ``start_ray`` gives ``ray.init`` under this ``RAY_ADDRESS``."""
    given = {}
    monkeypatch.setattr(task_runner.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(task_runner.ray, "init", lambda **kwargs: given.update(kwargs))
    if ray_address is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", ray_address)
    task_runner.start_ray(OmegaConf.create({"ray_kwargs": {"ray_init": options}}))
    del given["runtime_env"]
    return given


def test_cluster_that_is_joined_keeps_its_own_resources(monkeypatch, capsys):
    given = ray_options(monkeypatch, "10.0.0.1:6379", num_cpus=32, num_gpus=1, log_to_driver=False)
    assert given == {"log_to_driver": False}
    assert "10.0.0.1:6379" in capsys.readouterr().out


def test_address_among_the_options_counts_as_well(monkeypatch):
    assert ray_options(monkeypatch, None, num_cpus=4, address="auto") == {"address": "auto"}


@pytest.mark.parametrize("address", [None, "local"])
def test_run_that_sizes_its_ray_joins_no_other_by_chance(monkeypatch, address):
    assert ray_options(monkeypatch, address, num_cpus=4) == {"address": "local", "num_cpus": 4}


def test_run_without_sizes_finds_its_ray_as_verl_does(monkeypatch):
    assert ray_options(monkeypatch, None, num_cpus=None) == {"num_cpus": None}


def test_trainers_rendezvous_port_is_one_that_the_kernel_does_not_hand_out(tmp_path):
    file = tmp_path / "range"
    file.write_text("20000\t60999\n")
    first, end = task_runner.master_port_range(file)
    assert 10_000 <= first < end <= 20_000
    assert task_runner.master_port_range(tmp_path / "none")[1] <= 32768

    class Group:
        def __init__(self, **kwargs):
            self.ports = kwargs["master_port_range"]

    wrapped = task_runner.with_master_ports(Group)
    assert wrapped(master_port_range=[1, 2]).ports == [1, 2]
    assert wrapped().ports[0] >= 10_000
