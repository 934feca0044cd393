"""What real checkpoints bring and the embedded model lacks: end tokens, padded rows, bytes."""

import numpy as np
import pytest
import torch

from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.worker.llm_client import StopStrings
from tests.unit.shared import byte_tokenizer
from verl_ext.chunked_log_probs import entropy_of_logits, log_probs_of_labels


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize(("stop", "end"), [("né!", "ab né!"), ("ü", "ab né!ü"), ("</answer>", "")])
def test_stop_string_is_found_where_the_interruption_cuts_a_character(stop, end, cut):
    # As Llama's, it puts a begin of text before every plain text.
    tokenizer = byte_tokenizer("", bos_token="<bos>", add_bos_token=True)
    ids = np.array(tokenizer.encode("ab né!ü c", add_special_tokens=False), np.int32)
    prompt = tokenizer.encode("ü né", add_special_tokens=False)
    turn, found = [], StopStrings(tokenizer, prompt, {"stop": [stop]}, [])
    for part in (ids[:cut], ids[cut:]):
        turn.append(found.end(Segment(part, np.zeros(len(part), np.float32), 1)))
        if turn[-1].stop_reason:
            break
    made = [token for segment in turn for token in segment.token_ids.tolist()]
    assert tokenizer.decode(made) == (end or "ab né!ü c")
    assert turn[-1].stop_reason == ("completed" if end else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_pad_the_vocabulary_change_nothing(dtype):
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 260).to(dtype), torch.randint(0, 260, (5,))
    padded = torch.cat([logits, torch.full((5, 4), torch.finfo(dtype).min, dtype=dtype)], -1)
    assert torch.allclose(log_probs_of_labels(padded, labels), log_probs_of_labels(logits, labels), atol=1e-6)
    assert torch.allclose(entropy_of_logits(padded), entropy_of_logits(logits), atol=1e-6)
