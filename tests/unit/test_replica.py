"""What the recipe asks of the engine that verl starts."""

import asyncio
import subprocess
from argparse import Namespace
from unittest.mock import AsyncMock

import psutil
import pytest

from recipe.partial_rollout.engine import replica
from recipe.partial_rollout.engine.replica import _end_processes
from tests.e2e.bare_server import serve


@pytest.mark.parametrize(("said", "tokens"), [(768, 1536), (None, None)])
def test_kv_cache_of_two_engines_is_vllms_own_figure(said, tokens):
    cache, parallel = Namespace(kv_cache_size_tokens=said), Namespace(data_parallel_size=2)
    engine = Namespace(vllm_config=Namespace(cache_config=cache, parallel_config=parallel))
    assert asyncio.run(serve(engine, replica.RecipeVLLMServer).kv_tokens()) == tokens


def test_headroom_is_vllms_watermark_unless_the_user_has_set_it(monkeypatch):
    monkeypatch.setattr(replica.vLLMHttpServer, "run_server", AsyncMock())
    server = object.__new__(replica.RecipeVLLMServer)
    server.config, server.replica_rank, server.engine = Namespace(custom={"kv_headroom": 0.05}), 1, None
    ours, users = (Namespace(watermark=share, scheduler_cls=None) for share in (0.0, 0.2))
    for args in (ours, users):
        asyncio.run(server.run_server(args))
    assert (ours.watermark, users.watermark) == (0.05, 0.2)


async def test_failed_weight_sync_keeps_its_first_error(monkeypatch):
    failures = [ValueError("not of a sync"), OSError("no space left"), RuntimeError("the sender has gone")]
    monkeypatch.setattr(replica.vLLMHttpServer, "collective_rpc", AsyncMock(side_effect=failures))
    server = object.__new__(replica.RecipeVLLMServer)
    for method, failure in zip(["profile", *["update_weights_from_ipc"] * 2], failures, strict=True):
        with pytest.raises(type(failure)):
            await server.collective_rpc(method)
    assert await server.weight_sync_error() == "OSError: no space left"


def test_only_the_processes_that_a_killed_server_left_behind_are_ended():
    engine, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        created = psutil.Process(engine.pid).create_time()
        # The second one has taken the id of an engine that is gone.
        _end_processes(None, [(engine.pid, created), (other.pid, created - 100.0), (2**22 + 1, created)])
        assert not psutil.pid_exists(engine.pid) and other.poll() is None
    finally:
        for process in (engine, other):
            process.kill()
            process.wait()


def test_workers_give_back_their_caches_before_a_restarted_engine_measures(monkeypatch):
    """And the sender looks its server up again, in a trainer as beside an engine. Ray is slow to free the server's name."""
    done, fused, alone = [], Namespace(server_handle="dead"), Namespace(server_handle="dead")
    senders = [Namespace(worker_dict={"actor_rollout": Namespace(rollout=fused)}), Namespace(server_adapter=alone)]

    async def note(what):
        done.append(what)

    async def launch():
        await note("launch")
        restarted.servers = ["new"]
        if done.count("launch") < 7:
            raise ValueError("the name is already taken")

    def called_in(worker):
        async def call(function, *args):
            done.append(function.__name__)
            function(worker, *args)

        return Namespace(__ray_call__=Namespace(remote=call))

    restarted = object.__new__(replica.RecipeVLLMReplica)
    restarted.servers, restarted.workers = [], [called_in(sender) for sender in senders]
    restarted.gpus_per_replica_node, restarted._engine_processes = 1, []
    restarted.launch_servers, restarted.sleep = launch, lambda: note("sleep")
    monkeypatch.setattr(replica.asyncio, "sleep", lambda _: note("pause"))
    asyncio.run(restarted.relaunch())
    tries = ["pause", "launch"] * 7
    assert done == ["_empty_cache"] * 2 + tries + ["_forget_server"] * 2 + ["sleep"] and restarted.servers == ["new"]
    assert fused.server_handle is None and alone.server_handle is None
