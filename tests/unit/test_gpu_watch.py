"""GPU utilisation, with NVML replaced."""

from types import SimpleNamespace

import pynvml
import pytest

from recipe.partial_rollout.training import gpu_watch
from recipe.partial_rollout.training.gpu_watch import GpuSampler, GpuWatch


def test_sampler_averages_over_gpus_that_say_and_forgets_what_was_taken(monkeypatch):
    utilisations = [100, None, 50]

    def rates(device):
        if utilisations[device] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=utilisations[device])

    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(utilisations))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", rates)
    monkeypatch.setattr(gpu_watch.threading.Thread, "start", lambda self: None)
    sampler = GpuSampler()
    sampler.sample()
    sampler.sample()
    assert [sampler.take(), sampler.take()] == [(3.0, 4), (0.0, 0)]
    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    sampler = GpuSampler()
    sampler.sample()
    assert sampler.take() == (0.0, 0)


def test_step_has_the_mean_over_all_nodes_and_no_figure_without_an_answer(monkeypatch):
    def node(*taken):
        return SimpleNamespace(take=SimpleNamespace(remote=lambda: taken))

    def answers(taken, timeout):
        if (None,) in taken:
            raise gpu_watch.ray.exceptions.GetTimeoutError
        return taken

    monkeypatch.setattr(gpu_watch.ray, "get", answers)
    assert GpuWatch([node(8.0, 10), node(1.0, 5)]).take_metrics() == {"gpu/utilisation": pytest.approx(0.6)}
    for nodes in ([node(0.0, 0)], [], [node(None)]):
        assert GpuWatch(nodes).take_metrics() == {}
