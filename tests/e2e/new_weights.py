"""Other weights for a vLLM engine, as if a trainer had sent them, and a model's pace: an extension of vLLM's worker."""

import time


class NewWeights:
    """``slow_steps`` and ``scale_norms`` by name, for ``collective_rpc``."""

    def slow_steps(self, seconds: float) -> None:
        """Each step takes ``seconds`` longer, as a larger model's would."""
        execute = self.model_runner.execute_model

        def slowed(*args, **kwargs):
            time.sleep(seconds)
            return execute(*args, **kwargs)

        self.model_runner.execute_model = slowed

    def scale_norms(self, factor: float) -> int:
        """Multiply the weights of all layer norms by ``factor``, which changes keys, values and logits; their number."""
        norms = [
            weights for name, weights in self.model_runner.model.named_parameters() if name.endswith("norm.weight")
        ]
        for weights in norms:
            weights.data.mul_(factor)
        return len(norms)

    def scale_tower(self, factor: float) -> int:
        """As ``scale_tower`` below, of the engine's model."""
        return scale_tower(self.model_runner.model, factor)


def scale_tower(model, factor: float) -> int:
    """Multiply the weights of all norms of a vision tower by ``factor``; their number. vLLM's names are transformers'."""
    norms = [weights for name, weights in model.named_parameters() if "visual" in name and "norm" in name]
    for weights in norms:
        weights.data.mul_(factor)
    return len(norms)
