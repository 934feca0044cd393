"""Log-probs and entropy without flash-attn: exact, operators a chunk and not a token, no copies as large as the logits.

``python -m tests.bench log-probs`` measures them.
"""

import pytest
import torch
import verl.utils.torch_functional as in_force

from tests.bench.log_probs import MAKERS, VERL, error, exact, gradient, inputs, profiled
from verl_ext import chunked_log_probs

WHATS = pytest.mark.parametrize("what", MAKERS)


@WHATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values_are_within_a_millionth_of_float64s(what, dtype):
    assert error(what, in_force, *inputs(256, 32_000, dtype)) < 1e-6


def test_verls_own_are_still_coarse_and_cost_copies_of_the_logits():
    """The day they do not, ``chunked_log_probs`` is not needed."""
    assert error("log-probs", VERL, *inputs(256, 32_000)) > 0.02
    assert error("entropy", VERL, *inputs(256, 32_000)) > 0.02
    logits, labels = inputs(256, 1_000)
    assert profiled("log-probs", VERL, logits, labels)[0] > 4 * 256
    assert profiled("chunked entropy", VERL, logits, labels, backward=True)[1] > 2.5 * logits.numel() * 4


@WHATS
@pytest.mark.parametrize("backward", [False, True])
def test_operators_follow_the_chunks_and_not_the_tokens(what, backward, monkeypatch):
    def count(rows, chunks):
        monkeypatch.setattr(chunked_log_probs, "CPU_CHUNK", 100 * rows // chunks)
        return profiled(what, in_force, *inputs(rows, 100), backward=backward)[0]

    one, four, eight = count(64, 1), count(64, 4), count(64, 8)
    assert count(256, 4) == four
    a_chunk = (eight - four) / 4
    assert a_chunk == (four - one) / 3 and a_chunk < (90 if backward else 60)


@WHATS
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str
)
def test_gradients_are_those_of_float64(what, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(chunked_log_probs, "CPU_CHUNK", 3 * 100)
    logits, labels = inputs(7, 100, dtype)
    upstream = torch.randn(7, dtype=torch.float64)
    wanted = gradient(lambda each: exact(what, each, labels), logits.double(), upstream)
    found = gradient(MAKERS[what](in_force, labels), logits, upstream.to(torch.promote_types(dtype, torch.float32)))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@WHATS
def test_memory_beside_the_gradient_is_one_chunks(what, monkeypatch):
    """The bytes that the module's docstring tells whoever plans a device's memory."""
    logits, labels = inputs(2_048, 1_000)
    chunk = 64 * 1_000
    monkeypatch.setattr(chunked_log_probs, "CPU_CHUNK", chunk)
    for backward in (False, True):
        gradients = backward * logits.numel() * logits.element_size()
        peak = profiled(what, in_force, logits, labels, backward)[1]
        assert peak <= gradients + chunked_log_probs.BYTES * chunk + 32 * len(logits)


def test_compiling_and_checkpointing_change_nothing():
    logits = torch.randn(2, 3, 50)
    wanted = VERL.entropy_from_logits(logits)
    torch._dynamo.utils.counters.clear()
    for function in (
        in_force.entropy_from_logits,
        torch.compile(in_force.entropy_from_logits, dynamic=True),
        lambda each: torch.utils.checkpoint.checkpoint(in_force.entropy_from_logits, each, use_reentrant=False),
    ):
        torch.testing.assert_close(function(logits), wanted)
    assert not torch._dynamo.utils.counters["stats"], "compiled: each number of chunks would be a graph of its own"
    labels = torch.randint(0, 50, (2, 3))
    torch.testing.assert_close(in_force.logprobs_from_logits(logits, labels), VERL.logprobs_from_logits(logits, labels))
