"""What a run works out: slots of a replica (seats, KV cache, what the user says, what rounds measure), its prompts."""

import asyncio
import re
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.rollout.recorder import Recorder
from recipe.partial_rollout.rollout.replicas import KV_SHARE, ReplicaSlots
from recipe.partial_rollout.training.trainer_run import TrainerRun
from tests.unit.shared import settings_of


def slots(most=128, *, given=False, kv=21_504, replicas=1):
    return ReplicaSlots(most, given=given, kv_tokens=kv, prompt=64, response=1024, replicas=replicas)


def call(tokens, context):
    return EngineCall("r", 0.0, 1.0, tokens, 0, context_tokens=context)


@pytest.mark.parametrize(
    ("chosen", "per_replica", "said", "measured"),
    [
        (slots(), 37, "KV cache holds 21,504 tokens, a sample is estimated at 576", 8),
        (slots(kv=10_000_000), 128, "max_num_seqs=128", 128),
        (slots(kv=100), 1, "KV cache holds 100 tokens", 1),
        (slots(40, given=True), 40, r"\(partial_rollout.slots_per_replica;", 40),
        # The engine has all its seats.
        (slots(kv=None), 128, "unknown number", 128),
    ],
)
def test_scarce_kv_bounds_slots_that_are_not_given_and_the_line_says_why(chosen, per_replica, said, measured):
    assert chosen.per_replica == per_replica
    assert re.search(said, chosen.describe()) and "\n" not in chosen.describe()
    chosen.update([call(4000, 64)])
    assert chosen.per_replica == measured


def test_slots_follow_the_measured_context_unless_the_change_is_small(capsys):
    chosen = slots(replicas=2)
    for nothing in ([], [call(0, 64)], [call(100, None)]):
        chosen.update(nothing)
    assert chosen.per_replica == 37 and chosen.total == 74 and chosen.of_a_worker(3) == 25
    # A token of the first call is decoded beside 114 others on average, one of the second beside 264.
    mean = (100 * 114 + 300 * 264) / 400
    changed = [chosen.update(calls) for calls in ([call(100, 64), call(300, 114)], [call(102, 64), call(306, 114)])]
    assert chosen.per_replica == int(KV_SHARE * 21_504 / mean) == 75
    assert changed == [True, False] and chosen.of_a_worker(3) == 50, "the manager is told once"
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("slots per replica: 75 from here on")


def test_preemptions_are_recorded_where_the_engines_count_them():
    control = MagicMock(new_preemptions=AsyncMock(side_effect=[4, None]))
    recorder = Recorder(None, None, control, slots())
    for found in ({"rollout/preemptions": 4}, {}):
        asyncio.run(recorder.engines())
        assert recorder.metrics == {"rollout/slots_per_replica": 37, **found}
        recorder.metrics.clear()


@pytest.mark.parametrize(
    ("overrides", "offered"),
    [([], 15), (["partial_rollout.drain=False"], 20), (["algorithm.filter_groups.enable=True"], 20)],
)
def test_prompts_are_offered_for_the_steps_that_may_train_them(composed_config, overrides, offered):
    settings = PartialRolloutConfig.from_config(composed_config("quickstart_cpu", *overrides))
    assert TrainingSteps(per_epoch=10, epochs=2, last=15).offered(settings) == offered


def test_training_of_more_steps_than_its_data_has_ends_with_the_data(resolved_config, capsys):
    config = resolved_config("quickstart_cpu", "trainer.total_epochs=2")
    trainer = SimpleNamespace(config=config, settings=settings_of(4, 8), total_training_steps=9)
    TrainerRun._offer(trainer, range(3))
    # verl's fit validates and saves in it.
    assert trainer.total_training_steps == trainer.steps.last == 6
    said = capsys.readouterr().out
    assert "the training will end after step 6 of trainer.total_training_steps=9: the data has" in said
    # The workers make their schedules of these.
    for part in (config.actor_rollout_ref.actor, config.critic):
        assert part.optim.total_training_steps == 6, "a decay ends with the training"
