"""verl's and the recipe's vLLM server around an engine of the test, without Ray, HTTP and a trainer."""

import asyncio
from types import SimpleNamespace


class Config(SimpleNamespace):
    """verl's rollout config, as far as its server reads it."""

    def get(self, key, default=None):
        return getattr(self, key, default)


def serve(engine, server_class, response=100, resume_kv="recompute"):
    """A ``server_class`` around ``engine``: verl's own methods without Ray, HTTP and weights."""
    server = object.__new__(server_class)
    server.config = Config(
        max_model_len=128,
        prompt_length=16,
        response_length=response,
        full_determinism=False,
        enable_rollout_routing_replay=False,
        mtp=None,
        custom={"resume_kv": resume_kv},
    )
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.node_rank = server.replica_rank = server._admitting = server.global_steps = 0
    server._disaggregation_role, server._pd_decode_peers = "null", []
    server._submission_paused = server._rejecting = False
    server._resume_event = asyncio.Event()
    server._resume_event.set()
    server.engine = engine
    if hasattr(server, "front_engine"):
        server.front_engine()
    return server
