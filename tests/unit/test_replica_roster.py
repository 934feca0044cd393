"""Restarted replicas become known to the workers, also if verl's load balancer has died."""

import asyncio
from types import SimpleNamespace

from ray.exceptions import ActorDiedError

from recipe.partial_rollout.rollout import replicas
from recipe.partial_rollout.rollout.replicas import ReplicaRoster


def test_workers_meet_a_restarted_replica_although_the_load_balancer_is_dead(monkeypatch):
    async def dead(_servers):
        raise ActorDiedError

    async def ask_each(verb, argument):
        told.append((verb, argument(0)))

    told, traced, warned = [], [], []
    monkeypatch.setattr(replicas.logger, "warning", lambda *words: warned.append(words[0]))
    control = SimpleNamespace(addresses=["a", "b"], servers={"a": 1, "b": 2}, restarted=0)
    verb = SimpleNamespace(remote=dead)
    balancer = SimpleNamespace(remove_servers=verb, add_servers=verb)
    roster = ReplicaRoster(control, balancer, SimpleNamespace(use_replicas=traced.append), 1)
    control.addresses, control.servers, control.restarted = ["a", "c"], {"a": 1, "c": 3}, 1
    asyncio.run(roster.announce_restarted(SimpleNamespace(ask_each=ask_each)))
    assert [verb for verb, _ in told] == ["use_replicas"] and traced == [["a", "c"]]
    assert "load balancer is dead" in warned[0]
