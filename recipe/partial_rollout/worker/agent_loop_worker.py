"""The worker that claims samples and keeps the engines full (PR).

Its control flow::

    claim (long poll) ----> start or resume samples ----> finished / interrupted ----> report
          ^                  (they wait for the round)                                   |
          +------------------- grants for the slots that came free ----------------------+

A sample keeps its coroutine over interruptions; only its slot goes back to the manager. Reports travel one at a time, so
what happens meanwhile goes out together with the next one. A turn that has ended is reported with what follows it: the
next interruption, a tool call, the end of the sample. Where a reward call keeps that waiting it goes out by itself, and
the end of a round leaves nothing unreported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from recipe.partial_rollout.manager import garbage
from recipe.partial_rollout.manager.messages import Report
from recipe.partial_rollout.manager.types import Grant, Progress, SampleOutput
from recipe.partial_rollout.waits import ReplicaError, one_line, result_of
from recipe.partial_rollout.worker.grant_gate import GrantGate, GrantTimeoutError
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient
from recipe.partial_rollout.worker.observed_worker import ObservedAgentLoopWorker, trajectory_of
from recipe.partial_rollout.worker.tool_journal import journaled
from recipe.partial_rollout.worker.turn_alignment import sample_output

_NOTED_AFTER_S = 1.0
"""that a reward call takes before the manager is told of the turn which it scores: most end sooner, and say it all"""


class PartialRolloutAgentLoopWorker(ObservedAgentLoopWorker):
    """Claims samples from the manager and runs each in an agent loop of verl's, interruptible at any engine call."""

    def setup(self, name: str, manager: Any, capacity: int, servers: dict[str, Any], place: float = 0.0) -> None:
        """Connect to the manager as ``name`` with ``capacity`` slots, and to the replicas (address to handle).

        ``place`` is this worker's among all, from 0 to 1: see ``ReplicaChoice``.
        """
        self._place = place
        self.use_replicas(servers)
        self.tools = journaled(self.tools, self.config.partial_rollout.failures.tool_timeout_s)
        self._name = name
        self._manager = manager
        self._capacity = capacity
        self._gate = GrantGate(self.config.partial_rollout.deadlines.grant_s)
        self._tasks: set[asyncio.Task] = set()
        self._live: set[LiveSample] = set()
        self._calling: set[str] = set()
        self._outbox = _Outbox()
        self._sending: asyncio.Task | None = None
        self._unreported: Exception | None = None
        self._quiet = asyncio.Event()
        self._broken = asyncio.Event()

    async def serve(self) -> None:
        """Claim and run samples for as long as the training lasts; ends only with an error.

        Raises:
            RuntimeError: the manager and this worker disagree on a sample; whatever else a report ended with.
        """
        await self._manager.register_worker.remote(self._name, self._capacity)
        broken = asyncio.create_task(self._broken.wait())
        while True:
            claim = asyncio.ensure_future(result_of(self._manager.claim.remote(self._name)))
            await asyncio.wait({claim, broken}, return_when=asyncio.FIRST_COMPLETED)
            self._raise_unreported()
            self._run(claim.result())

    async def _probe_sample(self, row: dict[str, Any], **sampling_params: Any) -> None:
        LIVE_SAMPLE.set(LiveSample(f"probe-{uuid4().hex}", keeper=_ProbeSlots(), priority=0))
        with contextlib.suppress(ProbeEndedError):
            await super()._probe_sample(row, **sampling_params)

    def use_replicas(self, servers: dict[str, Any]) -> None:
        """The replicas are these from here on (address to handle); between rounds."""
        assert isinstance(self.llm_client, PartialRolloutLLMClient)
        self.llm_client.use_replicas(servers, self._place)
        self.llm_client.use_tokenizer(self.tokenizer)

    def open_round(self) -> None:
        """Engine calls are allowed from here on."""
        garbage.hold()
        self._gate.open()

    def close_round(self) -> None:
        """No new engine call; those under way end when their replica aborts them."""
        self._gate.close()

    async def flush(self) -> None:
        """Return once no engine call is under way and the manager knows of everything that happened, and that it does."""
        self._raise_unreported()
        while not self._all_reported():
            self._quiet.clear()
            await self._quiet.wait()
            self._raise_unreported()
        garbage.release()
        await self._manager.flushed.remote(self._name)

    # -- samples ---------------------------------------------------------------------------------------------------

    def _run(self, grants: list[Grant]) -> None:
        for grant in grants:
            if grant.held != self._gate.holds(grant.sample_id):
                raise RuntimeError(
                    f"sample {grant.sample_id}: {self._name} {'has lost' if grant.held else 'still has'} the conversation "
                    f"that the manager thinks it {'holds' if grant.held else 'does not hold'}"
                )
            self._gate.grant(grant.sample_id)
            if not grant.held:
                task = asyncio.create_task(self._run_sample(grant), name=grant.sample_id)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run_sample(self, grant: Grant) -> None:
        sample = LiveSample(
            grant.sample_id,
            keeper=self,
            priority=grant.order,
            group=grant.group_uid,
            restored=deque(grant.segments),
            restored_tools={result["call"]: result for result in grant.tool_results},
            deadline_s=self.config.partial_rollout.failures.sample_timeout_s,
        )
        LIVE_SAMPLE.set(sample)
        self._live.add(sample)
        kwargs = self._kwargs({**grant.row, "uid": grant.group_uid})
        try:
            output = await sample.clock.run(
                self._run_agent_loop(self._sampling_params(), trajectory_of(grant.row), trace=False, **kwargs)
            )
        except Exception as error:
            if _ends_the_run(error):
                await self._manager.abandon.remote(one_line(error))
            else:
                self._outbox.note(sample)
                self._outbox.failed.append((grant.sample_id, one_line(error)))
        else:
            assert isinstance(output, SampleOutput)
            self._outbox.finished.append((grant.sample_id, output))
        self._live.discard(sample)
        self._gate.forget(grant.sample_id)
        self._send()

    async def _agent_loop_postprocess(self, output: AgentLoopOutput, validate: bool, **kwargs: Any) -> Any:
        sample = LIVE_SAMPLE.get()
        if sample is None:
            return await super()._agent_loop_postprocess(output, validate, **kwargs)
        if output.multi_modal_data:
            raise ValueError(
                f"sample {sample.id} has multi-modal data ({', '.join(output.multi_modal_data)}): "
                f"partial rollout trains text only; set partial_rollout.enable=False"
            )
        late = asyncio.get_running_loop().call_later(_NOTED_AFTER_S, sample.keeper.note, sample)
        try:
            with sample.clock.stopped():
                await self._compute_score([output], kwargs)
        finally:
            late.cancel()
        return sample_output(sample, output)

    # -- slots (``SlotKeeper``) ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        """Entered once the sample holds a slot in an open round."""
        if sample.has_unsent and not self._gate.is_open:
            # A checkpoint may come before its next call.
            self.note(sample)
        with sample.clock.stopped():
            await self._gate.wait(sample.id)
            self._calling.add(sample.id)
            try:
                yield
            finally:
                self._calling.discard(sample.id)
                self._quiet.set()

    def hand_in(self, sample: LiveSample) -> None:
        """Give the slot back, with whatever the manager does not know of the sample."""
        self._gate.revoke(sample.id)
        self._outbox.note(sample)
        self._outbox.interrupted.append(sample.id)
        self._send()

    def note(self, sample: LiveSample) -> None:
        """Tell the manager what it does not know of the sample."""
        self._outbox.note(sample)
        self._send()

    async def tell(self, sample: LiveSample) -> None:
        """As ``note``; returns once the manager knows.

        Raises:
            RuntimeError: it does not take reports of this worker any more.
        """
        told = asyncio.get_running_loop().create_future()
        self._outbox.note(sample)
        self._outbox.told.append(told)
        self._send()
        await told

    def _all_reported(self) -> bool:
        """Whether no engine call is under way and the manager knows of all that happened; sends what it does not."""
        if self._calling:
            return False
        for sample in self._live:
            # In a tool or reward call, which need not end before a checkpoint: the turn before it has ended.
            self._outbox.note(sample)
        if self._outbox:
            self._send()
        return self._sending is None or self._sending.done()

    # -- reports ---------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        told: list[asyncio.Future[None]] = []
        try:
            while self._outbox:
                told = self._outbox.told
                self._run(await self._manager.report.remote(self._outbox.take(self._name)))
                for waiting in told:
                    # The sample that waited may have been given up.
                    if not waiting.done():
                        waiting.set_result(None)
        except Exception as error:
            # What the report said is lost: the worker must not go on as if the manager knew of it.
            self._unreported = self._unreported or error
            self._broken.set()
            for waiting in [*told, *self._outbox.told]:
                waiting.cancel()
        self._quiet.set()

    def _raise_unreported(self) -> None:
        if self._unreported is not None:
            raise self._unreported


def _ends_the_run(error: Exception) -> bool:
    """Whether a retry could not change it: no replica is left to go on at, or no round has come."""
    return isinstance(error, GrantTimeoutError) or (isinstance(error, ReplicaError) and error.dead)


class ProbeEndedError(Exception):
    """The replicas were paused: a sample of the probe does not go on."""


class _ProbeSlots:
    """Slots of the probe: always granted, never given back."""

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        yield

    def hand_in(self, sample: LiveSample) -> None:
        raise ProbeEndedError(sample.id)

    def note(self, sample: LiveSample) -> None:
        """Nobody needs to know."""

    async def tell(self, sample: LiveSample) -> None:
        """See ``note``."""


class _Outbox:
    """What the manager has not been told yet."""

    def __init__(self) -> None:
        self.progress: list[Progress] = []
        self.interrupted: list[str] = []
        self.finished: list[tuple[str, SampleOutput]] = []
        self.failed: list[tuple[str, str]] = []
        self.told: list[asyncio.Future[None]] = []
        """resolved once the manager has the report that goes out next"""

    def __bool__(self) -> bool:
        return bool(self.progress or self.interrupted or self.finished or self.failed or self.told)

    def note(self, sample: LiveSample) -> None:
        segments, tool_results = sample.take_unsent()
        if segments or tool_results:
            self.progress.append(Progress(sample.id, segments, tool_results))

    def take(self, worker: str) -> Report:
        report = Report(
            worker,
            progress=tuple(self.progress),
            interrupted=tuple(self.interrupted),
            finished=tuple(self.finished),
            failed=tuple(self.failed),
        )
        self.__init__()
        return report
