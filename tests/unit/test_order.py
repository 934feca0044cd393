"""``partial_rollout.scheduling.policy`` with an order of the user's own: what it may do, how a broken one ends a run."""

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

from recipe.partial_rollout.config.keys import ConfigError, read
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig, Scheduling, SchedulingPolicy
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.scheduling import get_scheduling_priority, order_of
from recipe.partial_rollout.manager.types import Prompt, PromptGroup, RolloutFailedError, Sample
from tests.unit import orders
from tests.unit.shared import InProcess, settings_of

POLICY = "partial_rollout.scheduling.policy"
IMPORTED = "a function that can be imported"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def named(order):
    return f"{orders.__name__}.{order.__name__}"


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_every_policy_has_an_order_of_its_own(policy):
    groups = [PromptGroup(Prompt("0/0", {}), 0, birth=3, unfinished=2), PromptGroup(Prompt("0/1", {}), 1, birth=None)]
    keys = {each: [get_scheduling_priority(group, each) for group in groups] for each in SchedulingPolicy}
    assert [each for each, key in keys.items() if key == keys[policy]] == [policy]


@pytest.mark.parametrize(
    ("order", "overtake", "started"),
    [
        (orders.longest_prompt, None, [2, 1, 3, 0]),
        (orders.newest_first, None, [3, 2, 1, 0]),
        (orders.newest_first, 1.0, [0, 1, 2, 3]),
        (orders.newest_first, 0, [0, 1, 2, 3]),
    ],
)
def test_prompts_start_in_the_order_of_the_key_unless_overtaking_ends_it(manager, order, overtake, started):
    m = manager(batch=2, n=1, overlap=1.0, policy=named(order), overtake=overtake)
    m.begin_version(0)
    assert [lease.order for lease in m.claim("w0")] == started


def test_key_reads_a_group_and_cannot_change_it(segment):
    group = PromptGroup(Prompt("0/7", {"index": 7}), 7, birth=2, unfinished=1, finished_length=30)
    group.samples = [Sample("0/7#0", group), Sample("0/7#1", group, segments=[segment(5)])]
    seen = order_of(Scheduling(named(orders.itself)), 1)(group)
    assert (seen.uid, seen.order, seen.birth, seen.row["index"]) == ("0/7", 7, 2, 7)
    assert (seen.samples, seen.unfinished, seen.mean_finished_length, seen.tokens) == (2, 1, 30, 35)
    for name in ("birth", "unfinished", "row"):
        with pytest.raises(AttributeError):
            setattr(seen, name, 0)
    with pytest.raises(TypeError):
        seen.row["index"] = 0


@pytest.mark.parametrize("order", orders.BROKEN, ids=lambda order: order.__name__)
async def test_broken_key_ends_the_run_by_name_and_loses_nothing(prompts, output, order):
    settings = settings_of(2, 2, overlap=0.0, scheduling=Scheduling(named(order)))
    actor = ManagerActor(settings, InProcess())
    await actor.register_worker("w0", 3)
    await actor.begin_version(0, prompts(2), 0)
    with contextlib.suppress(RolloutFailedError):
        # One that breaks once a group has started has its samples claimed first.
        await actor.claim("w0")
    for wait in (actor.wait_batch(True), actor.claim("w0"), actor.begin_version(1, [], 0)):
        with pytest.raises(RolloutFailedError, match=rf"^{POLICY}={named(order)}: its key of group 0/\d"):
            await asyncio.wait_for(wait, 5)
    manager = actor._manager
    assert manager.groups.lost == 0
    granted = manager.samples.running.total() + len(manager.claim("w0"))
    assert granted == 3 and manager.slots.queue.sizes[None] == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bouned", "one of bounded, seed, or the import path of a function, such as my_package.my_module.my_order"),
        (7, "one of bounded, seed, or the import path of a function, such as my_package.my_module.my_order"),
        ("no_such_package.order", f"{IMPORTED} (ModuleNotFoundError: No module named 'no_such_package')"),
        ("tests.unit.orders.absent", f"{IMPORTED} (AttributeError: module 'tests.unit.orders' has no attribute "),
        ("tests.unit.orders.SOUND", f"{IMPORTED} (TypeError: SOUND is a tuple, not a function)"),
    ],
)
def test_order_that_does_not_load_is_refused_in_one_line(value, message):
    with pytest.raises(ConfigError) as caught:
        order_of(read(PartialRolloutConfig, {"scheduling": {"policy": value}}, ROOT)["scheduling"], 1)
    assert str(caught.value).startswith(f"{POLICY}={value}: {message}") and "\n" not in str(caught.value)


def test_example_of_the_page_orders_prompts(manager, tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n([^`]*QueuedGroup[^`]*)```", PAGE.read_text())
    name = re.search(rf"{POLICY}=my_orders\.(\w+)", PAGE.read_text())[1]
    (tmp_path / "my_orders.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    m = manager(batch=2, n=1, overlap=1.0, policy=f"my_orders.{name}", capacity=3, prompts=0)
    difficulties = {"0/0": 1, "0/1": 3, "0/2": 2, "0/3": 4, "0/4": 9, "0/5": 9}
    m.backlog.enqueue(Prompt(uid, {"extra_info": {"difficulty": value}}) for uid, value in difficulties.items())
    m.begin_version(0)
    leases = m.claim("w0")
    assert [difficulties[lease.group_uid] for lease in leases] == [4, 3, 2]
    m.interrupt(leases[-1].sample_id)
    assert [lease.group_uid for lease in m.claim("w0")] == ["0/2"], "what has begun goes before what is hard"
    assert m.slots.queue.problem is None
