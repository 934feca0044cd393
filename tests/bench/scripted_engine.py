"""Replicas that follow an engine curve in real time, under the recipe's own worker: what is left is scheduling."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from recipe.partial_rollout.config.keys import defaults_of
from recipe.partial_rollout.config.settings import FailureLimits, Placement, ToolCalls
from recipe.partial_rollout.manager.types import SampleOutput, Segment
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from recipe.partial_rollout.tools.planner.replica_model import Decoding, ReplicaModel
from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.live_sample import LiveSample
from recipe.partial_rollout.worker.llm_client import ReplicaChoice


class ScriptedReplica:
    """One replica in real time: ``ReplicaModel``, woken at its events."""

    def __init__(self, curve: EngineCurve) -> None:
        self._curve = curve
        self._model = ReplicaModel(curve)
        self._began = time.monotonic()
        self._waiting: dict[str, tuple[Decoding, int, asyncio.Future[int]]] = {}
        """by call: the call, the tokens it is to make, and who awaits them"""
        self._arrived: list[Decoding] = []
        """calls that the model does not have yet"""
        self._timer: asyncio.TimerHandle | None = None
        self._arming = False
        self._numbers = itertools.count()
        self.decoded = 0
        """tokens"""

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """A round begins: the clock starts again."""
        self._model, self._began = ReplicaModel(self._curve), time.monotonic()

    async def decode(self, sample_id: str, context: int, left: int) -> int:
        """Tokens made of ``left``: all, or as many as there were when the replica was interrupted."""
        # A sample may have several calls, and some that an earlier life of it has left behind.
        decoding = Decoding(f"{sample_id}@{next(self._numbers)}", context, left)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[decoding.id] = decoding, left, future
        self._arrived.append(decoding)
        if not self._arming:
            # Once for all that arrive together: what the model of an engine costs must not delay the next call.
            self._arming = True
            asyncio.get_running_loop().call_soon(self._start_arrived)
        return await future

    def interrupt(self) -> None:
        """The engine is quiet; the answers, with what each call has, are on their way."""
        given_back = [*self._model.interrupt(self._now), *self._arrived]
        self._arrived.clear()
        asyncio.get_running_loop().call_soon(self._end_all, [decoding.id for decoding in given_back])
        self._cancel_timer()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start_arrived(self) -> None:
        self._arming = False
        self._model.advance(self._now)
        for decoding in self._arrived:
            self._model.add(decoding)
        self._arrived.clear()
        self._wake_at_next_end()

    def _wake_at_next_end(self) -> None:
        self._cancel_timer()
        if len(self._model):
            delay = max(0.0, self._model.next_end() - self._now)
            self._timer = asyncio.get_running_loop().call_later(delay, self._run_to_end)

    def _run_to_end(self) -> None:
        while len(self._model) and self._model.next_end() <= self._now:
            self._end_all(self._model.run_to_end())
        self._wake_at_next_end()

    def _end_all(self, sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            decoding, asked, future = self._waiting.pop(sample_id)
            made = asked - decoding.left
            self.decoded += made
            if not future.done():
                future.set_result(made)


class ScriptedWorker(PartialRolloutAgentLoopWorker):
    """The recipe's worker; its agent loop is one turn of known length on scripted replicas.

    Args:
        curve: of each replica.
        replicas: that are this worker's.
        placement: of the run.
    """

    tools = ()
    llm_client = SimpleNamespace()  # type: ignore[assignment]
    reward_loop_worker_handles = None
    vocabulary = 1_000_000  # type: ignore[assignment]
    rollout_config = SimpleNamespace(prompt_length=10_000, response_length=1_000_000)  # type: ignore[assignment]

    def __init__(self, curve: EngineCurve, replicas: int, placement: Placement = Placement.COLOCATED) -> None:
        # verl's own set-up is left out: no tokenizer, no rewards, no configuration.
        self.config = SimpleNamespace(  # type: ignore[assignment]
            trainer=SimpleNamespace(save_freq=-1, use_v1=False),
            partial_rollout=SimpleNamespace(
                placement=placement,
                failures=SimpleNamespace(**{**defaults_of(FailureLimits), "sample_timeout_s": None}),
                tools=ToolCalls(),
            ),
        )
        self._scripted = [ScriptedReplica(curve) for _ in range(replicas)]
        self._choice = ReplicaChoice({f"r{i}": replica for i, replica in enumerate(self._scripted)})
        self._version = 0
        self._at_gate: set[str] = set()
        self._idle_since = 0.0
        self._waited: list[float] = []

    def begin(self, version: int, at: float) -> None:
        """The replicas hold the weights of ``version``; they idle since ``at`` (monotonic seconds)."""
        self._version, self._idle_since, self._waited = version, at, []
        for replica in self._scripted:
            replica.start()
        self.open_round()

    def interrupt(self) -> None:
        """All replicas abort."""
        for replica in self._scripted:
            replica.interrupt()

    def decoded(self) -> int:
        """Tokens of all its replicas, all rounds."""
        return sum(replica.decoded for replica in self._scripted)

    def ready(self) -> int:
        """Samples that hold a slot and wait for the round to open."""
        return sum(self._claims.samples[sample].leased.is_set() for sample in self._at_gate)

    def waited(self) -> tuple[float, float, int]:
        """What the slots waited before they decoded in this round: seconds in all, those of the last one, and slots."""
        return sum(self._waited), max(self._waited, default=0.0), len(self._waited)

    async def _trained(self, sample: LiveSample, row: dict[str, Any]) -> SampleOutput:
        length = row["lengths"][int(sample.id.rpartition("#")[2])]
        await self._turn(sample, length)
        return output_of(length, self._version)

    async def _turn(self, sample: LiveSample, length: int, context: int = 0) -> None:
        """Decode ``length`` tokens after ``context``, in as many calls as it takes."""
        turn = sample.start_turn(context, request_digest=f"after {context}")
        done = len(turn)
        while done < length:
            self._at_gate.add(sample.id)
            async with self._claims.engine_call(sample):
                self._at_gate.discard(sample.id)
                address, replica = self._choice.take(sample.affinity)
                # What comes later takes a slot that has decoded already.
                if len(self._waited) < self._claims.capacity:
                    self._waited.append(time.monotonic() - self._idle_since)
                made = await replica.decode(sample.id, context + done, length - done)
                self._choice.release(address)
                done += made
                ended = done == length
                if made:
                    zeros = np.zeros(made, np.float32)
                    sample.add(
                        turn, Segment(zeros.astype(np.int32), zeros, self._version, "completed" if ended else None)
                    )
                if not ended:
                    self._claims.release_slot(sample)


def output_of(length: int, version: int) -> SampleOutput:
    ids, probs = np.zeros(length, np.int32), np.zeros(length, np.float32)
    return SampleOutput(ids[:0], ids, np.ones(length, np.int8), probs, ids + version, 1, 0.0, {}, 2, {})
