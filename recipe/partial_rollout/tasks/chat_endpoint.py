"""An OpenAI-compatible endpoint inside an agent loop: any chat-completions client can generate, and its tokens are
trained.

A request whose messages begin with an earlier request and the endpoint's answer continues that conversation. It reuses
the answer's token ids: no text is tokenized again. Any other request begins a new conversation: that of a sub-agent, or
of a client that has rewritten its history. ``outputs`` returns all conversations for training, one row each. ``output``
returns one; the tokens of the others were decoded and are not trained. The endpoint uses only methods of verl's agent
loops, so it works under noPR and in validation too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Self

from aiohttp import web
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

Messages = list[dict[str, Any]]

_READ = ("messages", "tools", "max_tokens", "max_completion_tokens", "model", "user", "metadata")
_ONLY = {"stream": False, "store": False, "n": 1, "tool_choice": "auto", "parallel_tool_calls": True}
"""parameters that may be given with this value"""


class ChatError(ValueError):
    """A request that gets an error instead of a completion."""

    def __init__(self, message: str, code: str = "invalid_request_error", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation so far, in messages and in tokens; ``prompt_ids`` end where its first answer begins."""

    messages: Messages
    tools: Any
    rewritten: bool
    """whether it begins with answers that the endpoint has not given"""
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    log_probs: list[float] | None
    before: str = ""
    """id of the completion that it goes on from; "": it begins here"""

    @property
    def question(self) -> str:
        """Messages before its last answer, and its tools, as JSON: equal for two answers to the same request."""
        return json.dumps([self.messages[:-1], self.tools])


class ChatEndpoint:
    """An endpoint for one sample: ``async with ChatEndpoint(self, sampling_params) as chat`` serves ``chat.url``.

    The agent loop returns ``chat.output()`` to train one conversation, or ``chat.outputs()`` to train all of them
    (``trainer.use_v1=True``).

    Clients need ``timeout=None, max_retries=0``: an answer may take as long as the trainer's update. A request in a
    conversation that has ``data.max_response_length`` tokens gets the error ``context_length_exceeded``. If the client
    then raises, the ``async with`` block swallows its exception, and the tokens generated so far are trained.

    Args:
        loop: the agent loop, whose ``server_manager`` generates.
        sampling_params: the argument of the loop's ``run``; a request that asks for others is refused.
    """

    def __init__(self, loop: AgentLoopBase, sampling_params: dict[str, Any]) -> None:
        self._loop, self._sampling_params = loop, sampling_params
        self._conversations: dict[str, Conversation] = {}
        """by id of the completion that ends it"""
        self._numbers, self._name = itertools.count(), secrets.token_hex(16)
        self._full = False
        self._error: Exception | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_post(f"/{self._name}/v1/chat/completions", self._serve)
        app.router.add_route("*", "/{elsewhere:.*}", self._serve)
        # ``handler_cancellation``: if the client disconnects, its engine call is cancelled.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        # A client obeys http_proxy, and a proxy would send the request to its own machine.
        for name in ("no_proxy", "NO_PROXY"):
            spared = os.environ.get(name, "")
            if "127.0.0.1" not in spared:
                os.environ[name] = f"{spared},127.0.0.1".lstrip(",")
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/{self._name}/v1"
        return self

    async def __aexit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> bool:
        await self._runner.cleanup()
        if self._error is not None and isinstance(error, Exception):
            # Raise the cause: the client's exception says only that its server failed.
            raise self._error from error
        return self._full and isinstance(error, Exception)

    async def _serve(self, request: web.Request) -> web.Response:
        try:
            if "elsewhere" in request.match_info:
                words = "is not served: send requests to chat/completions below chat.url, while the sample runs"
                raise ChatError(f"{request.path} {words}", "not_found", 404)
            return web.json_response(await self.complete(await request.json()))
        except ChatError as error:
            known = error
        except Exception as error:
            self._error = error
            known = ChatError(f"{type(error).__name__}: {error}", "server_error", 500)
        words = {"message": str(known), "type": known.code, "param": None, "code": known.code}
        return web.json_response({"error": words}, status=known.status, headers={"x-should-retry": "false"})

    async def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to ``request``, both as the API has them; a client in this process may call it."""
        for key, value in request.items():
            if key not in _READ and value is not None and (key not in _ONLY or value != _ONLY[key]):
                why = "an answer comes whole and once, sampled as the agent loop's sampling_params say"
                raise ChatError(f"{key}={value!r:.60} is not served: {why}")
        conversation = await self._conversation(_plain(request.get("messages")), request.get("tools") or None)
        room = self._loop.rollout_config.response_length - len(conversation.response_ids)
        if room <= 0:
            self._full = True
            raise ChatError("no token is left of data.max_response_length", "context_length_exceeded")
        most = min(room, request.get("max_completion_tokens") or request.get("max_tokens") or room)
        context, number = conversation.prompt_ids + conversation.response_ids, next(self._numbers)
        params = {**self._sampling_params, "max_tokens": most}
        if conversation.tools and (ends := self._parser().stop_token_ids):
            params["stop_token_ids"] = [*(params.get("stop_token_ids") or ()), *ends]
        turn = await self._loop.server_manager.generate(self._name, prompt_ids=context, sampling_params=params)
        given = None if turn.log_probs is None else conversation.log_probs
        merged, mask, log_probs = await self._loop.ct_merge_assistant_token(
            context, turn.token_ids, conversation.mask, given, turn.log_probs
        )
        message = await self._message(turn.token_ids, conversation.tools, number)
        self._conversations[f"chatcmpl-{number}"] = replace(
            conversation,
            messages=conversation.messages + _plain([message]),
            response_ids=merged.token_ids[len(conversation.prompt_ids) :],
            mask=mask,
            log_probs=log_probs,
        )
        reason = "length" if len(turn.token_ids) >= most else "tool_calls" if "tool_calls" in message else "stop"
        counts = {"prompt_tokens": len(context), "completion_tokens": len(turn.token_ids)}
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.get("model") or "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": {**counts, "total_tokens": sum(counts.values())},
        }

    async def _conversation(self, messages: Messages, tools: Any) -> Conversation:
        """The conversation that ``messages`` are: one that goes on, or a new one."""
        if not messages or messages[-1]["role"] == "assistant":
            raise ChatError("messages: the last must be a question (there is none, or it is the assistant's)")
        like = {name: each for name, each in self._conversations.items() if each.tools == tools}
        known = [name for name, each in like.items() if messages[: len(each.messages)] == each.messages]
        if known:
            name = max(known, key=lambda name: len(like[name].messages))
            before = like[name]
            context = before.prompt_ids + before.response_ids
            merged, mask, log_probs = await self._loop.ct_merge_context_msg(
                before.messages, messages, context, before.mask, before.log_probs, tools=tools
            )
            response_ids = merged.token_ids[len(before.prompt_ids) :]
            merged_parts = {"response_ids": response_ids, "mask": mask, "log_probs": log_probs}
            return replace(before, messages=messages, before=name, **merged_parts)
        roles = [message["role"] for message in messages]
        # A first request may begin with assistant messages as examples, and later requests may repeat them.
        examples = messages[: len(roles) - roles[::-1].index("assistant")] if "assistant" in roles else []
        rewritten = bool(self._conversations and examples) and all(
            each.messages[: len(examples)] != examples for each in like.values()
        )
        build = self._loop.continuous_token_builder.build_initial_tokens
        return Conversation(
            messages, tools, rewritten, await asyncio.to_thread(build, messages, tools=tools), [], [], []
        )

    def _parser(self) -> ToolParser:
        return ToolParser.get_tool_parser(self._loop.rollout_config.multi_turn.format, self._loop.tokenizer)

    async def _message(self, token_ids: list[int], tools: Any, number: int) -> dict[str, Any]:
        tokenizer: Any = self._loop.tokenizer
        calls: list[FunctionCall] = []
        if token_ids[-1:] == [tokenizer.eos_token_id]:
            token_ids = token_ids[:-1]
        if tools:
            schemas = [OpenAIFunctionToolSchema.model_validate(tool) for tool in tools]
            content, calls = await self._parser().extract_tool_calls(token_ids, schemas)
        if not calls:
            return {"role": "assistant", "content": tokenizer.decode(token_ids, skip_special_tokens=True)}
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        named = [{"id": f"call_{number}_{i}", "type": "function", "function": each} for i, each in enumerate(functions)]
        return {"role": "assistant", "content": content, "tool_calls": named}

    def output(self, completion: str | None = None) -> AgentLoopOutput:
        """Return the conversation that ends with the completion of id ``completion``; None: the last conversation.

        Raises:
            ValueError: there is no completion, or the conversation begins with answers that this endpoint has not
                given.
        """
        if not self._conversations:
            raise ValueError("the endpoint has given no completion")
        conversation = self._conversations[completion or next(reversed(self._conversations))]
        if conversation.rewritten:
            raise ValueError(
                "the client went on from answers, or with tools, that are not those of its earlier requests: one row "
                "has one context. Return chat.outputs(), a row for each context (trainer.use_v1=True)"
            )
        return self._row(conversation)

    def outputs(self) -> list[AgentLoopOutput]:
        """Return all conversations, one row each, in the order in which they ended; the last row has the sample's
        score.

        If the client sent the same request several times, only one answer is kept: the one that it continued, else the
        last. If two conversations begin with the same tokens, these are trained in the first row and masked in the
        other.
        """
        gone_on = {each.before for each in self._conversations.values()}
        known = {self._conversations[name].question for name in gone_on if name}
        ends: dict[str, Conversation] = {}
        for name, each in self._conversations.items():
            if name not in gone_on and each.question not in known:
                ends.pop(each.question, None)
                ends[each.question] = each
        rows: list[AgentLoopOutput] = []
        for row in map(self._row, ends.values()):
            for other in rows:
                if other.prompt_ids == row.prompt_ids:
                    pairs = zip(other.response_ids, row.response_ids)  # noqa: B905
                    shared = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
                    row.response_mask = [0] * shared + row.response_mask[shared:]
            rows.append(row)
        return rows

    def _row(self, conversation: Conversation) -> AgentLoopOutput:
        most = self._loop.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=conversation.prompt_ids,
            response_ids=conversation.response_ids[:most],
            response_mask=conversation.mask[:most],
            response_logprobs=None if conversation.log_probs is None else conversation.log_probs[:most],
            num_turns=sum(message["role"] != "system" for message in conversation.messages),
            metrics=AgentLoopMetrics(),
        )


def _plain(messages: Any) -> Messages:
    """Return ``messages`` in the form that chat templates read, equal for all ways in which clients write a message."""
    try:
        return [_plain_message(message) for message in messages]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ChatError(
            f"messages cannot be read ({type(error).__name__}: {error}): each needs a role, and text as content"
        ) from error


def _arguments(text: str) -> Any:
    """Arguments of a tool call as chat templates read them; the model's own text where it is no JSON object, as in verl."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    plain = {"role": message["role"], "content": content}
    plain.update({key: message[key] for key in ("name", "tool_call_id") if message.get(key)})
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        named = [{"name": each["name"], "arguments": _arguments(each["arguments"])} for each in functions]
        plain["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": each} for call, each in zip(calls, named, strict=True)
        ]
    return plain
