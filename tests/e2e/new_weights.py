"""Other weights for a vLLM engine, as if a trainer had sent them: an extension of vLLM's worker."""


class NewWeights:
    """``scale_norms`` by name, for ``collective_rpc``."""

    def scale_norms(self, factor: float) -> int:
        """Multiply the weights of all layer norms by ``factor``, which changes keys, values and logits; their number."""
        norms = [
            weights for name, weights in self.model_runner.model.named_parameters() if name.endswith("norm.weight")
        ]
        for weights in norms:
            weights.data.mul_(factor)
        return len(norms)
