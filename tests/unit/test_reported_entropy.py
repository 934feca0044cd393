"""The update's forward pass gives the policy's entropy, verl's number, without a gradient of it."""

from types import SimpleNamespace

import pytest
import torch
import verl.utils.torch_functional as verl_F
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_ext.reported_entropy import ASKED, REPORTED

LENGTHS, VOCABULARY = (5, 3), 11


@pytest.fixture(params=[True, False], ids=["packed", "padded"])
def outputs(request):
    """``outputs(**flags)``: logits and what verl's engine makes of them, as in a forward pass over two sequences."""
    packed, total = request.param, sum(LENGTHS)
    shape = (1, total, VOCABULARY) if packed else (len(LENGTHS), max(LENGTHS), VOCABULARY)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    settings = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine = SimpleNamespace(
        engine_config=settings,
        compute_entropy_from_logits=verl_F.entropy_from_logits,
        _gather_and_unpad_packed=lambda values, pad_size: values,
    )
    ids = torch.nested.as_nested_tensor([torch.zeros(n, dtype=torch.long) for n in LENGTHS], layout=torch.jagged)
    given = {
        "input_ids_rmpad_rolled": torch.arange(total) % VOCABULARY,
        "temperature": torch.full((len(LENGTHS),), 0.5),
        "temperature_rmpad": torch.full((total,), 0.5),
        "pad_size": 0,
    }

    def run(**flags):
        data = TensorDict({"input_ids": ids}, batch_size=len(LENGTHS))
        tu.assign_non_tensor(data, use_remove_padding=packed, **flags)
        prepare = vars(FSDPEngineWithLMHead)["prepare_model_outputs"]
        return logits, prepare(engine, SimpleNamespace(logits=logits), given, data, None)

    return run


def test_entropy_is_verls_and_has_no_gradient(outputs):
    def gradient(logits, model_output):
        return torch.autograd.grad(model_output["log_probs"].values().sum(), logits)[0]

    _, verls = outputs(calculate_entropy=True)
    logits, ours = outputs(**{ASKED: True})
    assert verls["entropy"].requires_grad, "verl's has one: the patch is still needed"
    assert not ours[REPORTED].requires_grad and "entropy" not in ours
    torch.testing.assert_close(ours[REPORTED].values(), verls["entropy"].values().detach())
    _, plain = outputs()
    assert set(plain) == {"log_probs"}
    torch.testing.assert_close(gradient(logits, ours), gradient(logits, plain))
    both = outputs(**{ASKED: True, "calculate_entropy": True})[1]
    assert set(both) == {"log_probs", "entropy"}, "where verl computes it, it is not computed twice"
