"""The example loop that compacts, decoding greedily: what it says depends on the weights alone."""

from recipe.partial_rollout.tasks.compacting import CompactingLoop


class GreedyLoop(CompactingLoop):
    async def run(self, sampling_params, **row):
        return await super().run({**sampling_params, "temperature": 0.0}, **row)
