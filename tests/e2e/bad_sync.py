"""A vLLM worker extension whose second weight sync fails, as one does when a weight does not fit."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class FailingExtension(vLLMColocateWorkerExtension):
    syncs = 0

    def update_weights_from_ipc(self, *args, **kwargs):
        FailingExtension.syncs += 1
        if FailingExtension.syncs > 1:
            raise KeyError("model.layers.0.no_such_weight")
        return super().update_weights_from_ipc(*args, **kwargs)
