"""The task of conversations: its demonstrations are what verl's own tool loop makes of the same turns, token by token.

Its other facts are frozen as clock10's are (``test_ready_start``).
"""

import asyncio
import random

import pytest
import torch
from verl.experimental.agent_loop.tool_parser import ToolParser

from recipe.partial_rollout.tasks import ready_start
from recipe.partial_rollout.tasks.calculator.conversation import Conversations, call, own_turns
from recipe.partial_rollout.tasks.calculator.tokenizer import build_tokenizer
from recipe.partial_rollout.tasks.clock10.dataset import draw_validation
from recipe.partial_rollout.tasks.clock10.expression import Problem, draw_problem
from recipe.partial_rollout.tasks.clock10.reward import compute_score
from tests.unit.shared import converse


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def composed(composed_config, monkeypatch):
    """The task's config, with a tool that answers at once."""
    monkeypatch.setenv("TOOL_MEDIAN_S", "0")
    return composed_config("quickstart_cpu", "task=calculator")


def turns_of(ids, eos):
    """The model's turns in a demonstration's ids: what the engine would return, call by call."""
    own, turns = own_turns(torch.tensor([ids]))[0].tolist(), [[]]
    for token, mine in zip(ids, own, strict=True):
        if mine:
            turns[-1].append(token)
            if token == eos:
                turns.append([])
    return turns[:-1]


def test_verls_tool_loop_makes_the_demonstration_of_its_turns(tokenizer, composed):
    for seed in range(6):
        rng = random.Random(seed)
        problem = draw_problem(rng)
        asked = [{"role": "user", "content": problem.prompt}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        said = Conversations(careful_share=1.0).respond(problem, rng)
        response = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
        turns = turns_of(prompt + response, tokenizer.eos_token_id)
        output = converse(composed, tokenizer, problem.prompt, lambda _, turns=turns: turns.pop(0))
        assert (turns, output.prompt_ids, output.response_ids) == ([], prompt, response)
        own = own_turns(torch.tensor([prompt + response]))[0, len(prompt) :]
        assert output.response_mask == own.int().tolist()
        text = tokenizer.decode(response, skip_special_tokens=True)
        assert compute_score("clock10", text, problem.prompt) == 1.0


def test_verls_tool_loop_ends_a_search_without_end_within_the_response(tokenizer, composed):
    problem = Problem((3, 4, 2, 9, 5), 8)
    turn = [*tokenizer.encode(call("3+4+2+9+5-8"), add_special_tokens=False), tokenizer.eos_token_id]
    output = converse(composed, tokenizer, problem.prompt, lambda _: turn)
    assert output.num_turns == 24 + 23 + 1
    assert len(output.response_ids) < composed.data.max_response_length
    text = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    assert compute_score("clock10", text, problem.prompt) == 0.0


def test_warm_start_that_ships_calls_well_and_has_something_to_learn(composed, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = ready_start.make_task(tmp_path / "task", ready_start.Parameters(), task="calculator")
    assert made == "unpacked from the package"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "task" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "task" / "model")
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    calls, scores = [], []

    def decode(ids):
        torch.manual_seed(len(calls))
        said = model.generate(torch.tensor([ids]), max_new_tokens=40)[0, len(ids) :].tolist()
        if not tokenizer.decode(said).startswith("!"):
            calls.append(said)
        return said

    for problem in draw_validation(64, 0)[:14]:
        output = converse(composed, tokenizer, problem.prompt, decode)
        text = tokenizer.decode(output.response_ids, skip_special_tokens=True)
        scores.append(compute_score("clock10", text, problem.prompt))
    well_formed = [asyncio.run(parser.extract_tool_calls(said))[1] != [] for said in calls]
    assert len(calls) > 50 and sum(well_formed) >= 0.98 * len(calls)
    assert 0.25 < sum(scores) / len(scores) < 0.75
