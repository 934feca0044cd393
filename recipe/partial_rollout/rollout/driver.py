"""The driver: where a reader begins. One step of a run, with the file behind each line.

Step s trains from the weights of version v = s - 1 and makes version s. N is the number of groups of a batch::

    start, or resume                         main_ppo.py                 the checks (preflight/), then Ray
        choose a checkpoint                  checkpoint/run_checkpoints.py   a complete one
        restore the samples in flight        manager/codec.py            single-turn samples continue from their tokens
        load its weights into the engines    training/weight_transfer.py
    rollout, when verl's fit asks for it     training/agent_loop_manager.py  calls next_batch of this file
        prompts = source.take(wanted)        rollout/prompt_source.py    in the order of the data, as verl reads it
        manager.begin_version(v)             manager/prompts_manager.py
            admit prompts as groups          manager/admission.py        up to (1 + overlap) N in flight; none gets too old
        open the workers' gates              worker/claim_loop.py
        workers, for as long as they live:
            claim samples                    manager/scheduling.py       the oldest first, each worker its share
            run verl's agent loop            worker/agent_loop_worker.py, over worker/observed.py, which noPR uses
                generate a turn              worker/llm_client.py        an abort makes a segment; the loop notices nothing
                    decode                   engine/replica.py           vLLM, until the turn ends or is aborted
                call a tool                  worker/live_sample.py       with a deadline
                no engine call for 0.1 s     worker/claim_loop.py        its slot goes to another sample
            match tokens to engine calls     worker/agent_loop_worker.py, as worker/live_sample.py has kept them
            score                            worker/rewards.py
            report                           manager/actor.py            the answer has the next leases
                a failed sample              manager/policies.py         is retried; after sample_retries it is masked
        manager.wait_batch                   manager/actor.py            until N groups are ready and the rest can still be
                                                                         trained in time (manager/admission.py)
            watch workers, trainers, stop    rollout/guard.py            a dead worker is replaced
        interrupt the engines                rollout/replicas.py         unfinished turns come back as segments
        manager.batch                        manager/actor.py            the driver fetches its outputs from Ray's store
        begin_version(v + 1)                                             leases wait at the workers' gates
    train, in verl's fit                     training/trainer_run.py
        assemble the batch                   training/agent_loop_manager.py
        log-probs of pi_prox, if needed      training/loss.py            trainer_run.py decides
        advantages                           verl_ext/trained_rows.py    verl's; masked samples are in no baseline
        update                               training/loss.py            behaviour weights, trust region
    finish_step                              rollout/driver.py, recorder.py   the groups are trained; run.jsonl, metrics
    save, every save_freq steps              checkpoint/run_checkpoints.py   weights and what is in flight
    load version s into the engines          training/weight_transfer.py
        restart dead replicas                rollout/replicas.py
        accept requests again

A sample can call an engine while three gates allow it. In colocated placement they are::

                         manager  worker gate  engines
    take_batch           CLOSED   open         decode
    interrupt            CLOSED   shut         quiet
    begin_version        OPEN     shut         (granted samples wait)
    sleep, update        OPEN     shut         asleep
    finish_step, load    OPEN     shut         awake, loaded
    resume               OPEN     shut         accept
    next_batch: open     OPEN     open         decode

In separate placement samples run on while the trainer has its batch, and no gate closes. A weight sync *holds* the engines:
they stop between two tokens, load, and go on with the same samples. Only a checkpoint or a stop aborts them,
so that the manager knows every token::

    colocated   engines   |decode=============|abort            load|decode====
                driver    | wait for the batch|  trainer updates    |
                manager                       ^ begins v + 1

    separate    engines   decode=========================|hold|==decode========
                driver    wait | trainer updates  | stage |load| wait |
                manager                                  ^ begins v + 1

A step ends in ``finish_step``, after the update. The next batch, the next weights and a checkpoint need a finished
step. Requested earlier, they raise RuntimeError and do not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.partial_rollout.checkpoint.manifest import read_snapshot, write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.manager.actor import ManagerActor, RayObjects
from recipe.partial_rollout.manager.types import Prompt, StepSummary, TakenGroup
from recipe.partial_rollout.records.run_log import Begin
from recipe.partial_rollout.rollout.guard import Guard
from recipe.partial_rollout.rollout.prompt_source import PromptSource, TrainingSteps
from recipe.partial_rollout.rollout.recorder import Recorder, StepBatch
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.waits import result_of

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 10.0
"""seconds that ``explain`` waits for the manager's tracebacks after the run has failed"""


def connect(
    recorder: Recorder,
    steps: TrainingSteps,
    source: PromptSource,
    *,
    workers: list[Any],
    spawn: Callable[[], Any],
    trainers: Sequence[Any],
    stop: StopSignals,
) -> Driver:
    """Start the manager actor, connect the agent-loop workers to it, and drive them.

    Args:
        workers, spawn, trainers, stop: see ``Guard``. The others: see ``Driver``.
    """
    settings = recorder.settings
    store = RayObjects(settings.deadlines.interrupt_s)
    # With dynamic sampling it is unknown how many prompts the training will consume, only how many it will train.
    bounded = settings.group_filter is not None and settings.drain
    train_groups = steps.last * settings.batch_groups if bounded else None
    manager = on_this_node(ray.remote(ManagerActor)).remote(settings, store, train_groups)
    guard = Guard(recorder, manager, workers, spawn, trainers, stop)
    asyncio.run(guard.start())
    return Driver(recorder, steps, source, manager, store, guard)


def on_this_node(actor_class: Any) -> Any:
    """Return the Ray actor class ``actor_class`` with options that place its actors on the driver's node, with 0 CPUs.

    The death of the driver's node ends the run in any case. On any other node an actor could be placed after that
    node's death, which Ray notices some 15 s late. An actor that asks for a CPU would wait if all CPUs of the node are
    taken.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return actor_class.options(num_cpus=0, scheduling_strategy=here)


class Driver:
    """Drives manager, workers and replicas, one batch after the other.

    Args:
        recorder: the run's recorder; it has the settings and replicas.
        source: gives the run's prompts.
        manager: handle of the manager actor.
        store: Ray's object store, from which the outputs of a taken group are fetched.
        guard: supervises the agent-loop workers, which are connected to ``manager``.
    """

    def __init__(
        self,
        recorder: Recorder,
        steps: TrainingSteps,
        source: PromptSource,
        manager: Any,
        store: RayObjects,
        guard: Guard,
    ) -> None:
        self._recorder, self._settings, self._control = recorder, recorder.settings, recorder.control
        self._steps, self._source = steps, source
        self._manager, self._store, self._guard = manager, store, guard
        self._stops = not self._settings.separate
        """whether the engines stop after each batch"""
        self._version = -1
        """the newest that has begun"""
        self.exhausted = False
        """whether the data has ended with fewer prompts left than a batch needs; updated when a version begins"""
        self._batch: StepBatch | None = None
        """with the trainer, until ``finish_step``"""
        self._since = 0.0
        """when the last batch was taken, or the engines first ran (unix seconds)"""

    # -- versions --------------------------------------------------------------------------------------------------

    async def _begin_version(self, version: int, prompts: list[Prompt]) -> None:
        """Have the manager begin ``version``."""
        beginning = self._manager.begin_version.remote(version, prompts, self._source.left)
        self.exhausted = await self._guard.wait(beginning, f"beginning policy version {version}")
        self._version = version

    async def _wanted_prompts(self) -> list[Prompt]:
        """Read as many prompts as the manager wants now."""
        what = "asking the manager how many prompts it wants"
        return self._source.take(await self._guard.wait(self._manager.wanted.remote(), what))

    async def _open(self) -> None:
        """Let the workers call the engines."""
        await self._guard.wait(self._guard.set_gate(open=True), "opening the round", key=None)

    # -- around a weight sync --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def loading(self, version: int) -> AsyncIterator[None]:
        """Enclose the load of ``version``: all replicas are alive and decode nothing; afterwards they accept requests.

        Separate: at the end the groups of ``version`` are admitted, and held requests go on.

        Raises:
            RuntimeError: the batch of the previous version is not trained.
        """
        self._require_trained(f"policy version {version}")
        runs_on = not self._stops and version < self._steps.last
        # Read while the engines still decode: a batch of a slow data loader would prolong the hold.
        prompts = await self._wanted_prompts() if runs_on else []
        restarted = self._control.restarted
        await self._control.restart_dead()
        held_at = time.time()
        if not self._stops:
            await self._control.hold()
            # A replica that died since is restarted while the others are held: it cannot miss a version.
            await self._control.restart_dead()
        yield
        if self._control.restarted > restarted:
            # Before any gate opens: a worker must not call an address that is gone.
            telling = self._guard.ask("use_replicas", self._control.servers)
            await self._guard.wait(telling, "announcing restarted replicas", key=None)
            self._recorder.log.use_replicas(self._control.addresses)
        if runs_on:
            await self._begin_version(version, prompts)
            if not self._guard.open:
                self._since = time.time()
                await self._open()
        # Last, so that samples have their slots and wait when the engines accept requests.
        await self._control.resume()
        if not self._stops:
            self._recorder.phase("hold", version, held_at)

    async def sleep_replicas(self) -> None:
        """Colocated: let the replicas release device memory while the trainer has its batch. Separate: do nothing."""
        if self._stops:
            await self._control.sleep()

    # -- batches ---------------------------------------------------------------------------------------------------

    async def next_batch(self, step: int) -> list[TakenGroup]:
        """Wait for the batch of ``step`` and take it.

        Raises:
            RuntimeError: the trainer has not finished the previous batch (``finish_step``).
            RolloutFailedError: a sample, worker, replica, trainer, reward function or the manager failed; the message
                names it.
            TimeoutError: a wait passed its deadline.
            StopTraining: the user asked for it; the engines are quiet, and the manager has every decoded token.
        """
        self._require_trained("the next batch")
        requested_at, log = time.time(), self._recorder.log
        log.add(Begin(step, requested_at))
        if self._stops:
            # Only for the first step of a process: any other version began while the trainer had the batch before.
            if self._version != step - 1:
                await self._begin_version(step - 1, await self._wanted_prompts())
            await self._open()
        began, opened_at = time.monotonic(), time.time()
        try:
            await self._batch_taken(step, began)
        except StopTraining:
            await self._suspend()
            raise
        if self._stops:
            await self._interrupt()
        else:
            self._recorder.phase("wait", step, requested_at)
        taken_at = time.time()
        # Not in the answer of ``wait_batch``, for which the engines would have to wait.
        ready = await self._guard.wait(self._manager.batch.remote(), "asking the manager for the batch")
        # Ray's ``get`` blocks; in a thread, the guard goes on watching the workers.
        fetching = asyncio.to_thread(self._store.fetch, {group.uid: group.outputs for group in ready.groups})
        outputs = await self._guard.wait(fetching, "fetching the batch", key=None)
        ready = replace(ready, groups=[replace(group, outputs=outputs[group.uid]) for group in ready.groups])
        since = requested_at if self._stops else self._since
        batch = StepBatch(step, ready, since, opened_at, taken_at)
        batch.check(self._settings.batch_groups, self._settings.failures.max_masked_fraction)
        self._batch, self._since = batch, taken_at
        # So that the next round begins with its samples claimed: they wait at the gates while the trainer updates.
        if self._stops and step < self._steps.last:
            await self._begin_version(step, await self._wanted_prompts())
        return ready.groups

    async def _batch_taken(self, step: int, began: float) -> None:
        """Wait until the manager has taken the batch. If it wants prompts first, enqueue them and wait again."""
        while not await self._guard.wait_batch(self._manager.wait_batch.remote(self._stops), step, began):
            prompts = await self._wanted_prompts()
            offered = self._manager.enqueue.remote(prompts, self._source.left)
            await self._guard.wait(offered, "offering prompts to the manager in the round")

    async def finish_step(self) -> None:
        """Record the trainer's batch as trained. Colocated: first collect the tokens of the interrupted samples.

        Raises:
            RuntimeError: the trainer has no batch.
        """
        batch = self._batch
        if batch is None:
            raise RuntimeError("the trainer has no batch: there is nothing to finish")
        # First: the lengths of the interrupted samples are part of this step's metrics.
        if self._stops:
            await self._collect()
        # Calls of a validation may be among them; their sample names have no "#".
        ended = await self._guard.wait(self._guard.ask("take_calls"), "asking the workers for their calls", key=None)
        calls = [call for calls in ended for call in calls if "#" in call.sample]
        summary: StepSummary = await self._guard.wait(self._manager.finish_step.remote(), "finishing the step")
        for error in summary.errors:
            logger.warning(
                "in a sample of step %d, %s raised %s (the first of this kind; later ones are not shown)",
                batch.step,
                error.where,
                error.line,
            )
        self._recorder.batch(batch, summary, calls, self._guard.restarted)
        await self._recorder.engines()
        await self._guard.follow_lengths(calls)
        # Last: if anything above fails, the step is not finished, and no checkpoint is made of it.
        self._batch = None

    def _require_trained(self, what: str) -> None:
        if self._batch is not None:
            raise RuntimeError(f"the batch of step {self._batch.step} is not trained: it is too early for {what}")

    async def explain(self, error: Exception) -> None:
        """Add tracebacks to ``error``, which ends the run: those of the first error of each kind in a sample or tool.

        The manager keeps these tracebacks; other messages have only one line of an error. If the manager does not
        answer, nothing is added.
        """
        with contextlib.suppress(Exception):
            answer = result_of(self._manager.first_errors.remote())
            for traceback in await asyncio.wait_for(answer, _LAST_WORDS_S):
                error.add_note(f"\nThe first error of its kind in a sample:\n{traceback}")

    # -- checkpoints, the end --------------------------------------------------------------------------------------

    def in_flight(self) -> dict[str, Callable[[Path], object]]:
        """Writers of the parts of a checkpoint that hold what is in flight, by name."""
        return {
            "source": lambda path: write_snapshot(path, self._source.state_dict()),
            "manager": lambda path: asyncio.run(self.save(path)),
        }

    async def save(self, path: Path) -> None:
        """Write the manager's state to ``path``, with all tokens decoded so far but those of unfinished conversations.

        If the workers' gates are open (separate placement), the engines are interrupted first and resumed afterwards.

        Raises:
            RuntimeError: the batch that the trainer has is not trained.
        """
        self._require_trained("a checkpoint")
        began, runs_on = time.time(), self._guard.open
        if runs_on:
            await self._interrupt()
            await self._collect()
        await self._guard.wait(self._manager.save.remote(str(path)), f"saving {path}", "weight_sync_s")
        if runs_on:
            await self._guard.wait(self._control.resume(), "resuming the replicas", key=None)
            await self._open()
            # ``_version + 1`` is the step that was trained last.
            self._recorder.phase("flush", self._version + 1, began)

    async def load(self, checkpoints: RunCheckpoints) -> None:
        """Restore the position in the data and what was in flight, from the checkpoint to resume.

        Call it before the first version begins. Colocated with a group filter, it begins the version of the resumed
        step itself, so that ``exhausted`` is right before the first step.
        """
        self._source.load_state_dict(read_snapshot(checkpoints.resumed_state("source")))
        path = checkpoints.resumed_state("manager")
        await self._guard.wait(self._manager.load.remote(str(path)), f"loading {path}", "weight_sync_s")
        if self._settings.group_filter is not None and self._stops:
            # The data may have ended before the checkpoint: ``exhausted`` must say so before the first step.
            await self._begin_version(checkpoints.resumed_step, await self._wanted_prompts())

    async def _suspend(self) -> None:
        """End the round without a batch, because the user asked to stop.

        Afterwards no sample can be claimed, and the manager knows every decoded token.
        """
        await self._guard.wait(self._manager.suspend.remote(), "suspending the round")
        await self._interrupt()
        await self._collect()

    async def _interrupt(self) -> None:
        """Abort the running requests and close the workers' gates; the workers then report the unfinished turns."""
        # At once: while the replicas abort what runs, the gates keep the next calls back.
        stopping = asyncio.gather(self._control.interrupt(), self._guard.set_gate(open=False))
        await self._guard.wait(stopping, "interrupting the round", key=None)

    async def _collect(self) -> None:
        """Wait until the manager knows every token."""
        what = "collecting the interrupted samples from the agent-loop workers"
        await self._guard.wait(self._guard.ask("flush"), what, key=None)
