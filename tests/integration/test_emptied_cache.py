"""vLLM's asynchronous scheduler, stepped by hand without an engine: its KV cache is emptied at every step, as by a hold."""

import functools
import inspect
import itertools
from collections import deque
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SAMPLES, RESPONSE = 5, 8


class SteppedCore:
    """Scheduler and executor, with two steps under way as in vLLM's engine core."""

    def __init__(self, config, executor):
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
        from vllm.v1.structured_output import StructuredOutputManager

        caches = get_kv_cache_configs(config, executor.get_kv_cache_specs(), executor.determine_available_memory())
        executor.initialize_from_config(caches)
        cache = generate_scheduler_kv_cache_config(caches)
        config.cache_config.num_gpu_blocks = cache.num_blocks
        scheduler_cls, size = config.scheduler_config.get_scheduler_cls(), config.cache_config.block_size
        sizes = {name: size for name in ("block_size", "hash_block_size") if takes(scheduler_cls, name)}
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=False,
            **sizes,
        )
        self.model_executor, self.batch_queue = executor, deque()

    def step(self):
        """Plan a step; once two are under way, take the older one's output."""
        if self.scheduler.has_requests():
            planned = self.scheduler.schedule()
            future = self.model_executor.execute_model(planned, non_block=True)
            if planned.total_num_scheduled_tokens:
                future = self.model_executor.sample_tokens(None, non_block=True)
            self.batch_queue.appendleft((future, planned))
            if len(self.batch_queue) < 2:
                return
        self.take()

    def take(self):
        future, planned = self.batch_queue.pop()
        self.scheduler.update_from_output(planned, future.result(10))

    def hold(self):
        """As vLLM does when it is paused with ``keep`` and its cache is emptied."""
        while self.batch_queue:
            self.take()
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)


def takes(scheduler_cls, name):
    return any(name in inspect.signature(kind.__init__).parameters for kind in scheduler_cls.__mro__)


@pytest.fixture(scope="module")
def stepped(tmp_path_factory):
    """(core, the executor's module, makes a request)."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (HERE, HERE.parent / "e2e"):
            patch.syspath_prepend(str(folder))
        import async_scheduling
        import scripted_executor
        from vllm.plugins import load_general_plugins
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        load_general_plugins()
        with async_scheduling.allowed() as own:
            args = scripted_executor.engine_args(tmp_path_factory.mktemp("scripted"), **own)
            config = args.create_engine_config()
        executor = scripted_executor.ScriptedExecutor(config)
        init_none_hash(sha256)
        make = functools.partial(request, get_request_block_hasher(scripted_executor.BLOCK, sha256))
        yield SteppedCore(config, executor), scripted_executor, make
        executor.shutdown()


def request(hasher, name, prompt, priority):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=RESPONSE, temperature=0.0, ignore_eos=True, logprobs=0),
        pooling_params=None,
        priority=priority,
        block_hasher=hasher,
    )


@pytest.mark.parametrize("room", ["plentiful", "scarce"])
@pytest.mark.parametrize("protocol", ["V1", "V2"])
def test_seats_taken_when_the_cache_is_emptied_are_free_for_a_request_of_better_priority(stepped, protocol, room):
    """Without ``verl_ext.vllm_preempted_ids`` vLLM 0.24.0 does not tell V2's worker, which has "No free indices" then."""
    core, scripted, make = stepped
    names, overlapped = itertools.count(), core.scheduler.overlapped
    for held_at in itertools.count(1):
        scripted.speak(core, protocol == "V2")
        lengths = scripted.ROOM[room]
        requests = [
            make(f"{protocol} {room} {next(names)}", scripted.prompt_of(i, lengths[i % 3]), i) for i in range(SAMPLES)
        ]
        for each in requests:
            core.scheduler.add_request(each)
        steps = 0
        while core.scheduler.has_requests() or core.batch_queue:
            core.step()
            steps += 1
            if steps == held_at:
                core.hold()
                core.model_executor.do_set_version(held_at)
                requests.append(make(f"{protocol} {room} {next(names)}", scripted.prompt_of(-1, 4), -1))
                core.scheduler.add_request(requests[-1])
        for each in requests:
            assert list(each.output_token_ids) == scripted.response_to(each.prompt_token_ids, RESPONSE), held_at
        assert core.model_executor.faults == [] and scripted.counts(core)["blocks"] == 0
        core.scheduler.reset_prefix_cache()
        if len(requests) == SAMPLES:
            break
    assert held_at > 2 * RESPONSE and core.scheduler.overlapped - overlapped > held_at
