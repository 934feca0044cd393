"""verl's vLLM replica whose server can be interrupted at once or held, reports failed syncs, and can keep KV blocks.

Interruption: verl's server closes its gate before it pauses the engine, and then waits until every request that has
passed the gate is *admitted*, so that the pause covers it. verl counts a request as admitted at its first output. A
request that vLLM still queues, for lack of a seat or of KV blocks, has no output: verl's interruption would first
decode the whole queue, for up to a minute. But ``AsyncLLM.add_request`` returns once the request is in the engine
core's input queue, which the core reads in order. A pause that is sent afterwards finds the request, running or queued,
and aborts it.

verl's server reads only the last output of a request, but has vLLM make an output at each step, with all tokens so far.
The recipe's server asks for the last output only (tests/studies/results/log.md has the cost of the others). So the
engine core can send tokens in pieces (``verl_ext.piecewise_scheduler``).

A hold keeps the requests while the weights change. The answer to a held request says which version made which token
(``hold``).

verl's sender waits for the receiver's answer without looking at the receiver's error, so a sync that fails in the
engine would hang the trainer. The server keeps the error, and ``RecipeCheckpointManager`` asks for it while it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self

import psutil
import ray
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm import logprobs
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.settings import ResumeKV
from recipe.partial_rollout.engine.hold import Mark, pause, record_marks, salt_of, tokens_made
from recipe.partial_rollout.waits import AGAIN_S, one_line
from verl_ext.vllm_plugin import PIECEWISE, preemptions_of

# A later vLLM may drop this name, which is therefore optional; ``vllm_contract.OPTIONAL`` lists all such names.
_FLAT: Any = getattr(logprobs, "FlatLogprobs", ())
_SYNC_METHODS = ("update_weights_from_ipc", "update_verl_delta_weights")
_END_S = 10.0
"""seconds for which a restart waits until the killed engine processes are gone"""

ProcessId = tuple[int, float]
"""process id and creation time (unix seconds), because ids are reused"""


# -- the engine as the server sees it -----------------------------------------------------------------------------------


@dataclass(slots=True)
class RequestFacts:
    """Facts about a request, from when the server is asked until it answers."""

    queued_s: float = 0.0
    """seconds that it was queued before it first ran. With vLLM's statistics off (``disable_log_stats``): 0 if it made
    a token, else the seconds until its end"""
    marks: list[Mark] = field(default_factory=list)
    """one mark for each hold before which it made new tokens"""


class AdmittingEngine:
    """vLLM's ``AsyncLLM`` with its own ``generate`` and ``pause_generation``; everything else is the engine's.

    ``generate`` reports when a request is admitted, and by default gives only its last output.

    Args:
        engine: the ``AsyncLLM``.
        salt: returns the cache salt of a request id (``salt_of``); None: requests have no salt, and all share KV
            blocks.
    """

    def __init__(self, engine: Any, salt: Callable[[str], str] | None = None) -> None:
        self._engine = engine
        self._salt = salt
        self.requests: dict[str, RequestFacts] = {}
        """by id; the server adds and removes them"""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def pause_generation(self, **options: Any) -> None:
        """Have the core send the tokens that it keeps back (``verl_ext.piecewise_scheduler``), then pause as vLLM does."""
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._engine.pause_generation(**options)

    async def generate(
        self, *, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput | None, None]:
        """Generate like ``AsyncLLM.generate``, but yield None first: from then on a pause or abort covers the request.

        Then yield one output with all tokens or, if the caller asks for DELTA, one output for each piece. A pause ends
        the request with the tokens so far; a request that was still queued has none. If the caller stops before the
        last output, the request is aborted. The log-probs of the last output may be an iterator, which can be read
        once.

        Args:
            sampling_params: not modified.
            request_id: unique.

        Raises:
            EngineDeadError: the engine has died. Other errors of the engine pass through unchanged.
        """
        queue, ended, began = None, False, time.monotonic()
        facts = self.requests.get(request_id) or RequestFacts()
        if self._salt is not None:
            prompt = {**prompt, "cache_salt": self._salt(request_id)}
        try:
            queue = await self._engine.add_request(request_id, prompt, _last_only(sampling_params), **options)
            yield None
            while not ended:
                # As vLLM's own ``generate``: what is there is taken without a turn of the event loop.
                output = queue.get_nowait() or await queue.get()
                ended = output.finished
                if ended:
                    facts.queued_s = _queued_s(output, began)
                    _thin(output)
                yield output
        except EngineDeadError:
            ended = True
            raise
        finally:
            if not ended:
                # By the caller's id while there is no queue: the engine may have the request nevertheless.
                await self._engine.abort(request_id if queue is None else queue.request_id, internal=queue is not None)
            if queue is not None:
                queue.close()


def _last_only(params: SamplingParams) -> SamplingParams:
    """Return ``params``; if they ask for cumulative outputs, return a copy that asks for the last output only.

    The copy also asks for flat log-probs: lists of numbers instead of an object for each token, because Python's
    garbage collector walks objects.
    """
    if params.output_kind is RequestOutputKind.CUMULATIVE:
        params = copy(params)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if hasattr(params, "flat_logprobs"):
            params.flat_logprobs = True
    return params


class _Sampled:
    """The log-prob of a sampled token, in the form that verl's server reads: ``log_probs[token].logprob``.

    Any ``token`` gives the same log-prob. ``_sampled`` uses one object for all tokens.
    """

    __slots__ = ("logprob",)

    def __getitem__(self, token: int) -> Self:
        return self


def _sampled(log_probs: logprobs.FlatLogprobs) -> Iterator[_Sampled]:
    """Yield the first log-prob of each token, which is the sampled token's."""
    each = _Sampled()
    for start in log_probs.start_indices:
        each.logprob = log_probs.logprobs[start]
        yield each


def _thin(output: RequestOutput) -> None:
    """Replace the flat log-probs in ``output`` by an iterator over those of the sampled tokens, which can be read once.

    vLLM's own reader makes a dictionary and an object for each token. At an interruption it would do so for all requests,
    in the server's only thread.
    """
    for answer in output.outputs:
        if isinstance(answer.logprobs, _FLAT):
            answer.logprobs = _sampled(answer.logprobs)  # type: ignore[assignment]


def _queued_s(output: RequestOutput, began: float) -> float:
    """Return the seconds that a request was queued; ``began`` is when it arrived (``time.monotonic``).

    Without vLLM's statistics return 0 if the request made a token, else the seconds from ``began`` to its end.
    """
    stats = output.metrics
    if stats is not None and getattr(stats, "scheduled_ts", None):
        return max(0.0, stats.scheduled_ts - stats.queued_ts)
    return 0.0 if any(answer.token_ids for answer in output.outputs) else time.monotonic() - began


# -- the server ----------------------------------------------------------------------------------------------------------


class RecipeVLLMServer(vLLMHttpServer):
    """``vLLMHttpServer`` that also aborts queued requests, can hold running ones, and obeys ``rollout.custom.resume_kv``.

    ``resume_generation`` ends an abort, a hold, or both:

    ======================  ====================  ==============================
    after                   requests in it        requests that arrive
    ======================  ====================  ==============================
    ``abort_all_requests``  end                   refused, or parked at the gate
    ``hold``                stay as they are      accepted, scheduled later
    both, in either order   end                   refused, or parked at the gate
    ======================  ====================  ==============================
    """

    _weight_sync_error: str | None = None
    _decoded = 0
    """tokens of the calls that have returned"""
    _held = False

    @property
    def _keeps_kv(self) -> bool:
        return (self.config.custom or {}).get("resume_kv") == ResumeKV.KEEP

    async def run_server(self, args: argparse.Namespace) -> None:
        """Start the server as verl does, with ``kv_headroom`` as vLLM's watermark and the recipe's scheduler.

        A watermark or scheduler that the user has set stays. A vLLM release that is not tested keeps its own scheduler.
        The first replica prints its model runner and its kind of scheduling.
        """
        if hasattr(args, "watermark"):
            args.watermark = args.watermark or (self.config.custom or {}).get("kv_headroom", 0.0)
        if releases.is_tested():
            args.scheduler_cls = args.scheduler_cls or PIECEWISE
        await super().run_server(args)
        if self.replica_rank == 0:
            print(f"engine: {chosen_by(self.engine.vllm_config)}")
        self.front_engine()

    def front_engine(self) -> None:
        """Wrap vLLM's engine in ``AdmittingEngine``, which salts each request if KV blocks are kept."""
        salt = (lambda request_id: salt_of(request_id, self.global_steps)) if self._keeps_kv else None
        self.engine = AdmittingEngine(self.engine, salt)

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **options: Any
    ) -> TokenOutput:
        """Generate as verl's server does, and add two ``extra_fields`` to the output.

        ``queued_s``: seconds that the engine queued the request. ``version_marks``, if it was held after a token: see
        ``spans``.
        """
        self.engine.requests[request_id] = facts = RequestFacts()
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **options)
        finally:
            del self.engine.requests[request_id]
        output.extra_fields["queued_s"] = facts.queued_s
        if facts.marks:
            output.extra_fields["version_marks"] = facts.marks
        self._decoded += len(output.token_ids)
        return output

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Abort all requests as verl's server does, but keep the KV blocks with ``resume_kv=keep``."""
        return await super().abort_all_requests(reset_prefix_cache and not self._keeps_kv, reject_request)

    async def hold(self) -> None:
        """Freeze all requests in the engine until ``resume_generation``, and record the version that made their tokens.

        Return when the engine is idle. Caches that depend on the weights are dropped, but with ``resume_kv=keep`` the
        KV blocks stay.

        Raises:
            EngineDeadError: the engine has died.
        """
        if self.node_rank != 0:
            return
        self._held = True
        await pause(self.engine, clear_kv=not self._keeps_kv)
        marks = {request_id: facts.marks for request_id, facts in self.engine.requests.items()}
        record_marks(marks, tokens_made(self.engine), self.global_steps)

    async def resume_engine_generation(self) -> None:
        """Resume generation as verl's server does, and end a hold."""
        self._held = False
        await super().resume_engine_generation()

    async def clear_kv_cache(self) -> None:
        """Clear the KV cache as verl's server does after a weight sync. With ``resume_kv=keep`` the KV blocks stay.

        The encoder cache is cleared with ``resume_kv=keep`` too, because a later request for the same image would get
        the outputs of the old weights. During a hold do nothing: ``hold`` has cleared these caches.
        """
        if self._held:
            return
        if not self._keeps_kv:
            await super().clear_kv_cache()
        elif self.node_rank == 0:
            await self.engine.reset_encoder_cache()

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """Call ``method`` on the workers as verl's server does.

        The first error of a weight sync is kept for ``weight_sync_error``.
        """
        try:
            await super().collective_rpc(method, *args, **kwargs)
        except Exception as error:
            if method in _SYNC_METHODS:
                # The first says why; what fails after it fails because of it.
                self._weight_sync_error = self._weight_sync_error or one_line(error)
            raise

    async def weight_sync_error(self) -> str | None:
        """Return the first error of a weight sync in this server's engine; None if none has failed."""
        return self._weight_sync_error

    async def check_alive(self) -> None:
        """Raise ``EngineDeadError`` if this server's engine has died."""
        if self.node_rank == 0:
            await self.engine.check_health()

    async def load(self) -> tuple[int, int]:
        """Return the number of requests in this server's engine, and the tokens decoded since its start.

        Tokens that the core has not sent yet (``verl_ext.piecewise_scheduler``) are not counted. Only the first server of
        a replica is asked.
        """
        # Answered by the API server alone, so it costs the engine no step.
        running = len(self.engine.output_processor.request_states)
        return running, self._decoded + sum(tokens_made(self.engine).values())

    async def child_processes(self) -> list[ProcessId]:
        """List the engine's processes; they outlive a killed server."""
        return [(child.pid, child.create_time()) for child in psutil.Process().children(recursive=True)]

    async def kv_tokens(self) -> int | None:
        """Return the capacity of this server's KV caches in context tokens, summed over its engines.

        None if vLLM states none. It is vLLM's own figure, which accounts for layers that cache less than the whole
        context.
        """
        config: VllmConfig = self.engine.vllm_config
        tokens = getattr(config.cache_config, "kv_cache_size_tokens", None)
        return tokens and tokens * config.parallel_config.data_parallel_size

    async def preemptions(self) -> int | None:
        """Return how many requests the engine has preempted since its start; None if this vLLM does not count them."""
        return await preemptions_of(self.engine)


def chosen_by(vllm_config: VllmConfig) -> str:
    """Name the model runner and the scheduler of an engine."""
    runner = {True: "V2", False: "V1", None: "unknown"}[getattr(vllm_config, "use_v2_model_runner", None)]
    scheduler = "asynchronous" if vllm_config.scheduler_config.async_scheduling else "synchronous"
    return f"model runner {runner}, {scheduler} scheduling"


class RecipeVLLMReplica(vLLMReplica):
    """``vLLMReplica`` with a ``RecipeVLLMServer`` that can be restarted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(RecipeVLLMServer)
        self._engine_processes: list[list[ProcessId]] = []
        """processes of the engine, by node"""

    async def launch_servers(self) -> None:
        """Launch the servers as verl does, and remember their engine processes."""
        await super().launch_servers()
        self._engine_processes = await asyncio.gather(*[server.child_processes.remote() for server in self.servers])

    async def check_alive(self) -> None:
        """Raise ``RayActorError`` or ``EngineDeadError`` (as Ray wraps it) if a server or its engine has died."""
        await asyncio.gather(*[server.check_alive.remote() for server in self.servers])

    async def hold_generation(self) -> None:
        """Freeze its requests until ``resume_generation``; returns when its engine is idle."""
        await asyncio.gather(*[server.hold.remote() for server in self.servers])

    async def relaunch(self) -> None:
        """Restart this replica: kill all its servers and engine processes, and launch new servers.

        The new servers are asleep. They hold the weights that the model was first loaded with, not the trainer's. The
        caller sets the deadline.
        """
        for server in self.servers:
            # Ray may no longer know a dead server.
            with contextlib.suppress(ValueError):
                ray.kill(server)
        self.servers = []
        # Their engines would hold their memory for ever.
        step = self.gpus_per_replica_node
        ending = [
            self.workers[node * step].__ray_call__.remote(_end_processes, processes)
            for node, processes in enumerate(self._engine_processes)
        ]
        await asyncio.gather(*ending)
        # A trainer's allocator keeps what its last update took; the new engine measures the free memory when it starts.
        await asyncio.gather(*[worker.__ray_call__.remote(_empty_cache) for worker in self.workers])
        while not self.servers:
            # Ray frees an actor's name a moment after its death.
            await asyncio.sleep(AGAIN_S)
            try:
                await self.launch_servers()
            except ValueError as error:
                if "already" not in str(error):
                    raise
                self.servers = []
        await asyncio.gather(*[worker.__ray_call__.remote(_forget_server) for worker in self.workers])
        # As verl starts them: the trainer uses the devices until the weight sync wakes the replicas up.
        await self.sleep()


def _end_processes(_worker: Any, processes: list[ProcessId]) -> None:
    """Kill those of ``processes`` that are alive, and wait for their end.

    It runs in one of verl's workers, on the node of the processes.
    """
    alive = []
    for pid, created in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()
                alive.append(process)
    psutil.wait_procs(alive, timeout=_END_S)


def _empty_cache(_worker: Any) -> None:
    """Release the memory that the worker's allocator has cached and does not use. Without a device nothing happens."""
    aggressive_empty_cache(force_sync=True)


def _forget_server(worker: Any) -> None:
    """Make ``worker`` forget its handle of the dead server, so that verl's ``ServerAdapter`` looks the new server up.

    It runs in the worker that sends weights to the server: a trainer's (``rollout``), or, where the engines have
    devices of their own, the ``CheckpointEngineWorker`` beside it (``server_adapter``).
    """
    parts = [worker, *getattr(worker, "worker_dict", {}).values(), *getattr(worker, "fused_worker_dict", {}).values()]
    for part in parts:
        for name in ("rollout", "server_adapter"):
            adapter = getattr(part, name, None)
            if adapter is not None and hasattr(adapter, "server_handle"):
                adapter.server_handle = None


def register() -> None:
    """Register this replica as ``rollout.name=vllm``."""
    RolloutReplicaRegistry.register("vllm", lambda: RecipeVLLMReplica)
