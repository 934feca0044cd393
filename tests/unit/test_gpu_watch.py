"""GPU utilisation: NVML is replaced, because the machines that test have no GPU."""

from types import SimpleNamespace

import pynvml
import pytest

from recipe.partial_rollout.training import gpu_watch
from recipe.partial_rollout.training.gpu_watch import GpuSampler, GpuWatch


def nvml(monkeypatch, *utilisations):
    """A node of as many GPUs; an utilisation (percent) that is None is a GPU that does not say."""

    def rates(device):
        if utilisations[device] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=utilisations[device])

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(utilisations))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", rates)
    monkeypatch.setattr(gpu_watch.threading.Thread, "start", lambda self: None)


class Handle:
    """A sampler as Ray shows it to the driver."""

    def __init__(self, *taken):
        self.take, self._taken = self, list(taken)

    def remote(self):
        return self._taken.pop(0)


def test_sampler_averages_over_gpus_that_say_and_forgets_what_was_taken(monkeypatch):
    nvml(monkeypatch, 100, None, 50)
    sampler = GpuSampler()
    sampler.sample()
    sampler.sample()
    assert sampler.take() == (3.0, 4)
    assert sampler.take() == (0.0, 0)

    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    sampler = GpuSampler()
    sampler.sample()
    assert sampler.take() == (0.0, 0)


def test_step_has_the_mean_over_all_nodes_and_no_figure_without_a_sample(monkeypatch):
    monkeypatch.setattr(gpu_watch.ray, "get", lambda taken, timeout: taken)
    watch = GpuWatch([Handle((8.0, 10)), Handle((1.0, 5))])
    assert watch.take_metrics() == {"gpu/utilisation": pytest.approx(0.6)}
    assert GpuWatch([Handle((0.0, 0))]).take_metrics() == GpuWatch([]).take_metrics() == {}

    def late(taken, timeout):
        raise gpu_watch.ray.exceptions.GetTimeoutError

    monkeypatch.setattr(gpu_watch.ray, "get", late)
    assert GpuWatch([Handle((1.0, 1))]).take_metrics() == {}, "a node that does not answer costs the figure only"
