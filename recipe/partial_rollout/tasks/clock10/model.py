"""The policy: a 0.6M-parameter Qwen3 model in float32.

float32 keeps the log-probabilities of an inference engine and a trainer within 1e-5 of each other on a CPU; bfloat16
leaves 1e-3, which hides real off-policy effects at this scale.
"""

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from recipe.partial_rollout.tasks.clock10.tokenizer import PAD, TURN_END, TURN_START, VOCABULARY, VOCABULARY_SIZE

MAX_POSITIONS = 4096


def build_config() -> Qwen3Config:
    """Return the model's architecture; its vocabulary is exactly the tokenizer's."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=VOCABULARY.index(TURN_START),
        eos_token_id=VOCABULARY.index(TURN_END),
        pad_token_id=VOCABULARY.index(PAD),
        dtype="float32",
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Return a randomly initialised model; equal seeds give equal weights. The global torch generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(build_config())
    # Sampling is plain by default: a top-k of 50, the library's usual default, would cut into 64 symbols.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    return model.float()
