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


FIRST, MUTE = node("first"), node("second", port=7002)
DEAD = node("second", alive=False, reason="missing too many heartbeats")


@pytest.mark.parametrize(
    ("tables", "lost"),
    [
        ([[FIRST, node("second")], [FIRST, DEAD]], ["second (10.0.0.2): missing too many heartbeats"]),
        # It no longer answers; Ray has not noticed.
        ([[FIRST, MUTE]], ["second (10.0.0.2): its raylet does not answer"]),
        # It was dead before the run.
        ([[FIRST, DEAD]], []),
        ([[node("10.0.0.2")], [node("10.0.0.2", alive=False)]], ["10.0.0.2: Ray gives no reason"]),
    ],
)
def test_node_that_died_meanwhile_is_named_with_its_reason(tables, lost):
    nodes = nodes_of(*tables, answers=lambda address, port: port != 7002)
    assert nodes.lost() == lost
    if not lost:
        nodes.blame(RuntimeError("a failure on living nodes keeps its own words"), "resume like this")


def test_ray_that_no_longer_answers_hides_no_failure():
    def table():
        if seen.pop():
            raise ConnectionError("the head is gone")
        return [FIRST]

    seen = [True, False]
    assert ClusterNodes(table=table, answers=lambda address, port: True).lost() == []


def test_node_whose_death_was_outlived_is_not_blamed_for_a_later_failure():
    died = [node("first"), node("third", alive=False, reason="power")]
    nodes = nodes_of([node("first"), node("third")], died, died)
    assert nodes.lost() == ["third (10.0.0.2): power"]
    nodes.outlive()
    assert nodes.lost() == []


def test_failure_after_a_nodes_death_names_the_node_and_how_to_resume():
    nodes = nodes_of([node("second")], [node("second", alive=False, reason="expected\ntermination")])
    with pytest.raises(NodeLostError) as caught:
        nodes.blame(RuntimeError("the actor died\nunexpectedly"), "resume like this")
    assert one_line(caught.value) == (
        "NodeLostError: Ray lost node second (10.0.0.2): expected termination. "
        "The run ends with RuntimeError: unexpectedly; resume like this"
    )


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
