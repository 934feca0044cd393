"""langgraph's ReAct agent with a calculator, as an agent loop: a chat model of langchain's on the loop's own client.

The model's weights do not change, and it always says the likeliest token: so what each prompt gets is known. A call costs a
moment, as calls do.
"""

import asyncio
import contextlib
import json
from typing import Any

from greedy_loop import fail_once
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent
from pydantic import Field
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import HermesToolParser

from recipe.partial_rollout.tasks.calculator.conversation import evaluate

STEPS = 14
"""of the agent's graph: six calls, and an answer"""


class Full(Exception):
    """The response has all the tokens that it may have."""


@tool
async def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: digits and operators.
    """
    await asyncio.sleep(0.02)
    return evaluate(expression)


class PolicyModel(BaseChatModel):
    """The policy, for one conversation."""

    agent: Any
    sampling_params: dict[str, Any]
    said: list[dict[str, Any]] = Field(default_factory=list)
    prompt: list[int] = Field(default_factory=list)
    response: list[int] = Field(default_factory=list)
    mask: list[int] = Field(default_factory=list)
    log_probs: list[float] = Field(default_factory=list)

    @property
    def _llm_type(self):
        return "policy"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, *args, **kwargs):
        raise NotImplementedError

    async def _agenerate(self, messages, stop=None, run_manager=None, **kwargs):
        asked, agent = convert_to_openai_messages(messages), self.agent
        if not self.said:
            self.prompt = await agent.ct_build_initial_tokens(asked)
        else:
            merged, self.mask, self.log_probs = await agent.ct_merge_context_msg(
                self.said, asked, self.prompt + self.response, self.mask, self.log_probs
            )
            self.response = merged.token_ids[len(self.prompt) :]
        room = agent.rollout_config.response_length - len(self.response)
        if room <= 0:
            raise Full
        turn = await agent.server_manager.generate(
            "react",
            prompt_ids=self.prompt + self.response,
            sampling_params={**self.sampling_params, "max_tokens": room},
        )
        merged, self.mask, self.log_probs = await agent.ct_merge_assistant_token(
            self.prompt + self.response, turn.token_ids, self.mask, self.log_probs, turn.log_probs
        )
        self.response = merged.token_ids[len(self.prompt) :]
        text, calls = await HermesToolParser(agent.tokenizer).extract_tool_calls(turn.token_ids)
        named = [
            {"name": call.name, "args": json.loads(call.arguments), "id": f"{len(self.said)}-{i}", "type": "tool_call"}
            for i, call in enumerate(calls)
        ]
        answer = AIMessage(content=text, tool_calls=named)
        self.said = [*asked, convert_to_openai_messages(answer)]
        return ChatResult(generations=[ChatGeneration(message=answer)])


class ReactLoop(AgentLoopBase):
    """Runs the agent until it answers, or has had its steps."""

    async def run(self, sampling_params, *, raw_prompt, **row):
        model = PolicyModel(agent=self, sampling_params={**sampling_params, "temperature": 0.0})
        agent = create_react_agent(model, [calculator])
        with contextlib.suppress(Full, GraphRecursionError):
            await agent.ainvoke({"messages": list(raw_prompt)}, {"recursion_limit": STEPS})
        most = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=model.prompt,
            response_ids=model.response[:most],
            response_mask=model.mask[:most],
            response_logprobs=model.log_probs[:most],
            num_turns=1 + len(model.said),
            metrics=AgentLoopMetrics(),
        )


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """How many digits are in the response."""
    fail_once()
    return float(sum(character.isdigit() for character in solution_str) % 11)
