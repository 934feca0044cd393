"""The driver's waits: lost workers are replaced, whoever does not answer is named, and no wait outlasts its deadline."""

import asyncio
import logging
import signal
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from recipe.partial_rollout import waits
from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Deadlines, Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import PromptsWanted, Report, RolloutFailedError
from recipe.partial_rollout.rollout import stop as stop_module
from recipe.partial_rollout.rollout.guard import Guard, TrainerLostError
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.rollout.workers import WorkerLostError, WorkerPool
from tests.unit.shared import Local

QUICK = Deadlines(stall_s=0.4, interrupt_s=0.2, start_s=0.2, weight_sync_s=0.2)


@pytest.fixture(autouse=True)
def asked_again_soon(monkeypatch):
    monkeypatch.setattr(waits, "AGAIN_S", 0.01)


def out_of_reach():
    return ActorUnavailableError("connection reset", None)


class Method:
    def __init__(self, function):
        self.remote = function


class FakeWorker:
    """Actor handle: ``serve`` ends when it is told to; ``answers`` says what becomes of each other question."""

    def __init__(self):
        self.ended, self.served, self.asked, self.errors, self.hangs = Future(), 0, [], [], set()
        self.serve = Method(self._serve)

    def _serve(self):
        self.served += 1
        return SimpleNamespace(future=lambda: self.ended)

    def __getattr__(self, verb):
        return Method(lambda *args: self._answer(verb, *args))

    def end(self, error):
        self.ended.set_exception(error)

    async def _answer(self, verb, *args):
        if self.ended.done() and self.errors == []:
            raise ActorDiedError
        if self.errors:
            raise self.errors.pop(0)
        if verb in self.hangs:
            await asyncio.sleep(60)
        self.asked.append((verb, *args))
        return verb


class Manager:
    """Actor handle of a manager that answers; ``hangs`` names verbs that it does not answer."""

    def __init__(self):
        self.released, self.decoding, self.hangs = [], 0, set()

    def __getattr__(self, verb):
        return Method(lambda *args: self._answer(verb, *args))

    async def _answer(self, verb, *args):
        if verb in self.hangs:
            await asyncio.sleep(60)
        if verb == "release_worker":
            self.released += args
            return 3
        self.decoding += verb == "note_decoding"


class Life:
    """A guard over two workers."""

    def __init__(self, restarts=1, trainers=(), manager=None, tokens=None):
        self.workers = [FakeWorker() for _ in range(2)]
        self.connected, self.manager, self.stop = [], manager or Manager(), StopSignals()
        self.killed = []
        self.pool = WorkerPool(
            self.workers, lambda i: FakeWorker(), self._connect, restarts, QUICK, self.stop, kill=self._kill
        )

        async def running_tokens():
            return {"a": next(tokens) if tokens else 0}

        context = SimpleNamespace(
            settings=SimpleNamespace(deadlines=QUICK),
            stop=self.stop,
            trainers=trainers,
            control=SimpleNamespace(running_tokens=running_tokens),
            source=None,
        )
        self.guard = Guard(context, self.manager, self.pool, look_every_s=0.02)

    async def _connect(self, i, name, worker):
        self.connected.append(name)

    def _kill(self, worker):
        self.killed.append(worker)
        worker.end(ActorDiedError())

    def signal(self):
        self.stop._number = signal.SIGTERM


def lived(body, **options):
    async def life():
        one = Life(**options)
        await one.pool.start()
        return await asyncio.wait_for(body(one), 5)

    return asyncio.run(life())


# -- workers that are lost -----------------------------------------------------------------------------------------------


def test_dead_worker_is_replaced_under_a_new_name_and_its_samples_are_released():
    async def body(life):
        await life.guard.wait(life.pool.open_round(), "opening the round", key=None)
        main, dead = asyncio.get_running_loop().create_future(), life.workers[1]
        waiting = asyncio.create_task(life.guard.wait_batch(lambda: main))
        await asyncio.sleep(0.01)
        dead.end(RayActorError())
        await asyncio.sleep(0.05)
        assert not waiting.done() and life.workers[1] is not dead
        assert life.connected == ["agent_loop_worker_0", "agent_loop_worker_1", "agent_loop_worker_1.2"]
        assert life.manager.released == ["agent_loop_worker_1"] and life.pool.restarted == 1
        assert life.workers[1].asked[0] == ("open_round",)
        main.set_result("complete")
        life.workers[0].end(RayActorError())
        return await waiting, await life.pool.ask("close_round")

    assert lived(body) == ("complete", ["close_round"]), "who lives answers"


@pytest.mark.parametrize(
    ("error", "restarts", "said"),
    [
        (RayActorError(), 0, r"agent_loop_worker_0 died during the round.*worker_restarts=0"),
        (ValueError("a mistake"), 1, "failed during the round: ValueError: a mistake"),
    ],
)
def test_worker_that_fails_or_dies_once_too_often_ends_the_wait_by_name(error, restarts, said):
    async def body(life):
        life.workers[0].end(error)
        await life.guard.wait(asyncio.sleep(5), "the round", key=None)

    with pytest.raises(WorkerLostError, match=said):
        lived(body, restarts=restarts)


def test_worker_that_ray_cannot_reach_for_a_moment_is_asked_again_and_goes_on():
    async def body(life):
        worker, other = life.workers
        lost, worker.ended, worker.errors = worker.ended, Future(), [out_of_reach()]
        lost.set_exception(out_of_reach())
        await life.guard.wait(asyncio.sleep(0.1), "the round", key=None)
        assert life.workers[0] is worker and worker.served == 2, "its loop is awaited again"
        other.errors = [out_of_reach()]
        assert await life.pool.ask("use_replicas", 7) == ["use_replicas"] * 2 and ("use_replicas", 7) in other.asked
        return life

    life = lived(body)
    assert life.manager.released == [] and life.pool.restarted == 0


def test_worker_that_lives_but_does_not_answer_is_ended_and_replaced(caplog):
    async def body(life):
        hung = life.workers[1]
        hung.hangs.add("flush")
        answers = await life.guard.ask("flush")
        await life.guard.wait(asyncio.sleep(0.02), "the next wait", key=None)
        return answers, life.killed == [hung], life.manager.released

    with caplog.at_level(logging.WARNING):
        assert lived(body) == (["flush"], True, ["agent_loop_worker_1"])
    assert "agent_loop_worker_1 did not answer flush within 0.2" in caplog.text
    assert "partial_rollout.deadlines.interrupt_s=0.2" in caplog.text


def test_worker_that_hangs_while_the_batch_is_awaited_is_found():
    async def body(life):
        life.workers[0].hangs.add("__ray_ready__")
        await life.guard.wait_batch(lambda: asyncio.sleep(5))

    with pytest.raises(WorkerLostError, match=r"agent_loop_worker_0 did not answer ray_ready within 0.2.*restarts=0"):
        lived(body, restarts=0)


def test_stop_signal_shortens_the_wait_for_a_worker_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(stop_module, "_GRACE_S", 0.05)
    slow = Deadlines(interrupt_s=600)

    async def body(life):
        life.pool._deadlines = slow
        hung = life.workers[0]
        hung.hangs.add("close_round")
        asyncio.get_running_loop().call_later(0.05, life.signal)
        await life.guard.ask("close_round")
        await life.guard.wait(asyncio.sleep(0.02), "the next wait", key=None)
        return life.workers[0] is hung, life.manager.released, await life.guard.ask("flush")

    not_replaced, released, answers = lived(body)
    assert not_replaced and released == ["agent_loop_worker_0"], "its samples go into the checkpoint"
    assert answers == ["flush"]


# -- what else ends a wait -----------------------------------------------------------------------------------------------


def test_wait_ends_at_its_deadline_by_name_and_key():
    with pytest.raises(
        TimeoutError, match=r"^saving x took more than 0.2 s \(partial_rollout.deadlines.weight_sync_s\)$"
    ):
        lived(lambda life: life.guard.wait(asyncio.sleep(9), "saving x", "weight_sync_s"))


def test_manager_that_does_not_answer_ends_the_round():
    manager = Manager()
    manager.hangs.add("standing")
    with pytest.raises(TimeoutError, match=r"^asking the manager actor how far the round is took more than 0\.2 s"):
        lived(lambda life: life.guard.wait_batch(lambda: asyncio.sleep(5)), manager=manager)


class Trainer:
    """Actor handle whose answers follow ``script``: an error to raise, or None; the last one for ever."""

    def __init__(self, *script):
        self._script = list(script)
        self.asked = 0
        self.__ray_ready__ = self

    async def remote(self):
        self.asked += 1
        answer = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if answer is not None:
            raise answer


def test_round_ends_when_a_trainer_dies_and_nothing_of_it_goes_on():
    cancelled = []

    async def rollout():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def body(life):
        with pytest.raises(TrainerLostError, match=r"trainer 1 of 2 died during the round: ActorDiedError"):
            await life.guard.wait_batch(rollout)
        await asyncio.sleep(0)

    lived(body, trainers=[Trainer(None), Trainer(None, ActorDiedError())])
    assert cancelled == [True]


def test_trainer_that_is_out_of_reach_for_a_moment_ends_nothing():
    trainer = Trainer(out_of_reach(), None)
    assert lived(lambda life: life.guard.wait_batch(lambda: asyncio.sleep(0.2, "ready")), trainers=[trainer]) == "ready"
    assert trainer.asked > 2


def test_users_stop_ends_the_wait_for_the_batch():
    async def body(life):
        life.signal()
        await life.guard.wait_batch(lambda: asyncio.sleep(5))

    with pytest.raises(StopTraining, match="SIGTERM"):
        lived(body)


def test_manager_that_wants_prompts_gets_what_the_source_has():
    async def body(life):
        source = SimpleNamespace(take=lambda count: [f"prompt {count}"], left=7)
        life.guard._context.source = source
        answers = iter([PromptsWanted(2), "complete"])
        offered = []

        async def offer(prompts, left):
            offered.append((prompts, left))

        life.manager.offer = Method(offer)
        return await life.guard.wait_batch(lambda: asyncio.sleep(0, next(answers))), offered

    assert lived(body) == ("complete", [(["prompt 2"], 7)])


# -- engines that decode keep the stall away -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readings", "progress"),
    [
        # Tokens of the requests that run: those of a new round, more, none more, fewer as requests end, none left.
        ([{"a": 5, "b": 0}, {"a": 5, "b": 1}, {"a": 5, "b": 1}], 2),
        ([{"a": 5}, {"a": 3}, {"a": 0}, {"a": 0}], 3),
        ([{"a": 0, "b": 0}, {}], 0),
        # b does not answer once, and has made nothing meanwhile.
        ([{"a": 1, "b": 4}, {"a": 1}, {"a": 1, "b": 4}], 1),
    ],
)
def test_engines_that_make_tokens_are_noted_and_those_that_make_none_are_not(readings, progress):
    left = list(readings)

    async def running_tokens():
        if not left:
            raise asyncio.CancelledError
        return left.pop(0)

    async def body(life):
        life.guard._deadlines = Deadlines(stall_s=0.004)
        life.guard._context.control.running_tokens = running_tokens
        with pytest.raises(asyncio.CancelledError):
            await life.guard._watch_engines()
        return life.manager.decoding

    assert lived(body) == progress


async def round_of_one_sample(prompts):
    actor = ManagerActor(Admission(Mode.WINDOW, 1, 1, 0.0, 2, 1, 4), Scheduling(), stall_s=QUICK.stall_s)
    await actor.register_worker("w0", 4)
    await actor.begin_version(0, prompts(1), False)
    (grant,) = await actor.claim("w0")
    return actor, grant.sample_id


async def test_round_with_one_long_response_goes_on_for_as_long_as_it_is_decoded(prompts, output):
    actor, sample_id = await round_of_one_sample(prompts)
    one = Life(manager=Local(actor), tokens=iter(range(1, 1000)))
    waiting = asyncio.ensure_future(one.guard.wait_batch(lambda: actor.wait_batch(True)))
    await asyncio.sleep(1.2)
    in_time = not waiting.done()
    await actor.report(Report("w0", finished=[(sample_id, output())]))
    ended = await asyncio.wait_for(waiting, 5)
    assert in_time and ended.admitted == ("0/0",)


async def test_round_in_which_the_engines_stop_decoding_ends_by_its_deadline(prompts):
    with pytest.raises(RolloutFailedError, match=r"no sample reported and no engine made a token for .*; 1 unfinished"):
        actor, _ = await round_of_one_sample(prompts)
        one = Life(manager=Local(actor), tokens=iter([1, 2, 3] + [3] * 1000))
        await asyncio.wait_for(one.guard.wait_batch(lambda: actor.wait_batch(True)), 5)
