"""The embedded task with today's transformers: its tokenizer.

What else it does cannot change unseen: the warm start that ships names the SHA-256 of its sources (``test_ready_start``).
"""

from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.tokenizer import CHARACTERS, build_tokenizer


def test_text_in_the_alphabet_round_trips_and_a_turn_costs_three_tokens_more():
    tokenizer, prompt = build_tokenizer(), Problem((3, 4, 2, 9), 8).prompt
    assert tokenizer.decode(tokenizer.encode(CHARACTERS, add_special_tokens=False)) == CHARACTERS
    other = tokenizer.encode("3é<|im_end|>", add_special_tokens=False)
    assert other == [tokenizer.convert_tokens_to_ids("3"), tokenizer.unk_token_id, tokenizer.eos_token_id]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], return_dict=False)
    assert len(ids) == len(prompt) + 1 + len(["start", "newline", "end", "newline"])
