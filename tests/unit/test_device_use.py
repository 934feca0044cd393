"""Utilisation of the node's GPUs, with a driver and a Ray that stand in for those of a GPU machine."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import ray

from recipe.partial_rollout.rollout.device_use import DeviceUse


def waited_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_utilisation_is_the_mean_of_what_was_sampled_in_the_round():
    use = DeviceUse(lambda: 0.0, every_s=3600)
    waited_for(lambda: use._seen)
    use._seen.clear()
    use._seen.extend([(10.0, 0.1), (20.0, 0.4), (30.0, 0.8), (40.0, 1.0)])
    assert use.within(15.0, 30.0) == pytest.approx(0.6)
    assert use.within(35.0, 45.0) == 1.0
    assert use.within(45.0, 50.0) is None


def test_sampling_that_fails_ends_in_a_line_and_the_run_goes_on(capsys):
    shares = iter([0.5])
    before = {*threading.enumerate()}
    use = DeviceUse(lambda: next(shares), every_s=0.0)
    waited_for(lambda: not {*threading.enumerate()} - before)
    assert use.within(0.0, time.time() + 1) == 0.5
    assert "NVML no longer answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "of_ray", "share"), [(2, 2.0, 0.75), (0, 0.0, None), (2, 1.0, None), (None, 2.0, None)]
)
def test_devices_of_the_node_are_sampled_if_ray_has_them_all(monkeypatch, devices, of_ray, share):
    """``devices`` None: there is no NVML."""
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: devices,
        nvmlDeviceGetHandleByIndex=range(devices or 0).__getitem__,
        nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=(50, 100)[device]),
    )
    nodes = [{"NodeID": "here", "Resources": {"GPU": of_ray}}, {"NodeID": "there", "Resources": {"GPU": 8.0}}]
    monkeypatch.setitem(sys.modules, "pynvml", None if devices is None else nvml)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    use = DeviceUse.of_this_node()
    if share is not None:
        waited_for(lambda: use._seen)
    assert (use and use.within(0.0, time.time() + 1)) == share
