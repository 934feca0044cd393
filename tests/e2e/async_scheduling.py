"""The scheduler of a GPU on a CPU: vLLM's ``AsyncScheduler``, which plans a step before the last one's tokens are known.

vLLM's CPU platform turns it off, in one line, since a CPU gains nothing by it. Everything else runs as it is: the real
engine core with its queue of two batches, the real worker in a process of its own, and the real model runner V1.

``allowed()`` around the start of an engine; vLLM then loads the two classes here, by their names, in its own processes.
"""

import contextlib
from unittest import mock

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.cpu_worker import CPUWorker

from verl_ext.piecewise_scheduler import PiecewiseAsyncScheduler


class WatchedScheduler(PiecewiseAsyncScheduler):
    """Counts its steps, and those that it planned while an earlier one was under way."""

    steps = overlapped = in_flight = 0

    def schedule(self, *args, **kwargs):
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            self.steps += 1
            self.overlapped += self.in_flight > 0
            self.in_flight += 1
        return output

    def update_from_output(self, scheduler_output, *args, **kwargs):
        self.in_flight -= scheduler_output.total_num_scheduled_tokens > 0
        return super().update_from_output(scheduler_output, *args, **kwargs)


def _watched(core):
    scheduler = core.scheduler
    return {
        "scheduler": [kind.__name__ for kind in type(scheduler).__mro__],
        "step": core.step_fn.__name__,
        "steps": scheduler.steps,
        "overlapped": scheduler.overlapped,
    }


EngineCore.watched = _watched


async def watched(engine):
    """Fail unless the scheduler of ``engine`` is the asynchronous one, and has overlapped steps."""
    seen = await engine.engine_core.call_utility_async("watched")
    assert "AsyncScheduler" in seen["scheduler"] and seen["step"] == "step_with_batch_queue", seen
    assert seen["overlapped"] > seen["steps"] / 4, seen


class _Nothing:
    """A stream or an event of a device that has computed a tensor when it returns it."""

    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    synchronize = wait_stream = wait_event = record_event = record


class AsyncCPUWorker(CPUWorker):
    """vLLM's worker on a CPU; the streams and events that its asynchronous outputs ask CUDA for do nothing."""

    def __init__(self, *args, **kwargs):
        torch.cuda.Event = torch.cuda.Stream = torch.Event = _Nothing
        torch.cuda.current_stream = _Nothing
        torch.cuda.stream = contextlib.nullcontext
        super().__init__(*args, **kwargs)

    def init_device(self):
        """As vLLM's; the stream that 0.24.0's runner makes for itself on a CPU cannot wait for another."""
        super().init_device()
        self.model_runner.async_output_copy_stream = _Nothing()


@contextlib.contextmanager
def allowed():
    """Arguments of an engine with this scheduler, which vLLM accepts while this lasts."""
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config)):
        yield {
            "async_scheduling": True,
            "scheduler_cls": f"{__name__}.WatchedScheduler",
            "worker_cls": f"{__name__}.AsyncCPUWorker",
        }
