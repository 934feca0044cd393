"""The example loop that compacts, decoding greedily: what it says depends on the weights alone."""

import os
from pathlib import Path

from recipe.partial_rollout.tasks.clock10 import reward
from recipe.partial_rollout.tasks.compacting import CompactingLoop
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient


class GreedyLoop(CompactingLoop):
    async def run(self, sampling_params, **row):
        return await super().run({**sampling_params, "temperature": 0.0}, **row)


def interrupted(generate):
    """``generate`` whose calls for a training sample are interrupted after each token."""

    async def one_token(client, request_id, *, request, sampling_params, **more):
        whole = request.sample is None or sampling_params["max_tokens"] == 1
        params = sampling_params if whole else {**sampling_params, "max_tokens": 1}
        answer = await generate(client, request_id, request=request, sampling_params=params, **more)
        if not whole and answer.token_ids[-1] != client.tokenizer.eos_token_id:
            answer.stop_reason = "aborted"
        return answer

    return one_token


if os.environ.get("INTERRUPT_EVERY_TOKEN"):
    PartialRolloutLLMClient.generate = interrupted(PartialRolloutLLMClient.generate)


def compute_score(*args, **kwargs):
    fail_once()
    return reward.compute_score(*args, **kwargs)


def fail_once():
    """Raise in the first call of a training whose ``REWARD_FAILS`` names a file."""
    if marker := os.environ.get("REWARD_FAILS"):
        try:
            Path(marker).touch(exist_ok=False)
        except FileExistsError:
            return
        raise ConnectionError("the reward's service is away")
