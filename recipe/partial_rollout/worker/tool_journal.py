"""Tools whose effects happen once: every finished call is journaled, and a replay returns its result.

A sample whose worker died, or whose run crashed, replays its conversation from the start: engine calls are answered from
the journal (``PartialRolloutLLMClient``), and so are tool calls. The first call that is not in the journal is real.

An entry carries what it answers, the tool's name and arguments, and a replay finds it by these; of equal calls the first
made is answered first. A replay that asks something else makes a real call, and from there on a tool with a state
(``restore``) makes all its calls. Calls are numbered as the agent loop makes them, and sample and number are a key that
stays: ``call_id``, ``0/12#3/0``, for each ``execute`` and each function that has a parameter of this name; None in
validation.

A call's entry has its answer, its reward and metrics, and what it changed in ``agent_data.extra_fields``, which verl hands
to the reward. A value that no checkpoint can hold fails the sample.

A call may have had its effect although it has no result: it ran out of time, its worker died, or the run resumes from a
checkpoint that was taken during the call. What happens then is the tool's to say, by attributes of the ``BaseTool`` or of
the function, each optional:

* ``repeatable = True`` (or ``repeatable: true`` in the tool's ``config``): the call is made again.
* ``status(call_id)``: the result of that call, or None if it never happened; it is then made again. When ``status`` has
  answered, the conversation's state is the one right after the call.
* ``snapshot(conversation)``: a handle (JSON-able) of the state that the tool keeps for a conversation, named by its
  sample. It is journaled with each result. ``restore(conversation, handle)`` puts that state back before the first real
  call, whatever an earlier life of the conversation has left; None stands for the state before any call. So a call that
  was cut off can be made again.
* None of them: a replay answers the call with an error, which verl's tool loop shows to the model like any other.

All but a ``repeatable`` tool's calls are journaled before they are made, once the manager has confirmed it.

A call that takes too long, with all that belongs to it, ends its sample. (Raising inside the tool would not do: agent
loops turn a tool's exception into its answer, and a hung tool gave none.) The call is cancelled if possible. A synchronous
function runs in a thread, which continues until the function returns; no other call waits for it. A coroutine that blocks
the event loop stops its worker, and only ``deadlines.stall_s`` detects that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse

from recipe.partial_rollout.checkpoint.plain_state import UnsaveableError, pack, unpack
from recipe.partial_rollout.worker.live_sample import LiveSample, OneOfASample, at_home

T = TypeVar("T")

Result = tuple[ToolResponse, float | None, dict[str, Any]]

_THREADS = ThreadPoolExecutor(2**20, thread_name_prefix="tool")
"""of synchronous tools, made as they are needed: a thread cannot be ended from outside, and no other call waits for it"""

logger = logging.getLogger(__name__)


class ToolError(RuntimeError):
    """A replayed tool call that failed the first time, or was cut off; or one that leaves what no journal can hold."""


class ToolTimeoutError(TimeoutError):
    """A tool did not answer in time."""


def journaled(tools: list[Any], sample: LiveSample | None, timeout_s: float | None = None) -> list[Any]:
    """``tools`` as verl loads them (``load_all_tools``) for one agent loop, in whatever thread it calls them.

    Args:
        sample: has the journal; None: there is none, in validation. timeout_s: for a call; None: no limit.
    """
    return [
        _journaled_function(tool, _Calls(tool.name, tool.fn, sample, timeout_s))
        if isinstance(tool, FunctionTool)
        else JournaledTool(tool, _Calls(tool.name, tool, sample, timeout_s))
        for tool in tools
    ]


def repeatable(tool: Any) -> bool:
    """Whether a call of ``tool``, a ``BaseTool`` or a function, may be made again after it was cut off."""
    return bool(getattr(tool, "repeatable", False) or (getattr(tool, "config", None) or {}).get("repeatable", False))


class _Calls(OneOfASample):
    """The calls of one tool by one agent loop: each within its deadline, and journaled.

    Args:
        name: of the tool.
        tool: what has the optional attributes (see the module).
        sample, timeout_s: see ``journaled``.
    """

    def __init__(self, name: str, tool: Any, sample: LiveSample | None, timeout_s: float | None) -> None:
        super().__init__()
        self._name = name
        self.sample = sample
        self._timeout_s = timeout_s
        self._repeatable = repeatable(tool)
        self._named = "call_id" in inspect.signature(getattr(tool, "execute", tool)).parameters
        self._status, self._snapshot, self._restore = (
            getattr(tool, verb, None) for verb in ("status", "snapshot", "restore")
        )

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function`` of the tool, synchronous or not."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        call = partial(contextvars.copy_context().run, function, *args, **kwargs)
        result = await asyncio.get_running_loop().run_in_executor(_THREADS, call)
        return await result if inspect.isawaitable(result) else result

    @at_home
    async def within(self, call: Awaitable[T]) -> T:
        """``call``'s result.

        Raises:
            ToolTimeoutError: none in time; the sample fails with it, too.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            sample = self.sample
            late = ToolTimeoutError(
                f"tool {self._name} gave no answer{'' if sample is None else f' to sample {sample.id}'} within "
                f"{self._timeout_s:g} s (partial_rollout.failures.tool_timeout_s)"
            )
            if sample is not None:
                sample.clock.end(late)
            raise late from error

    @at_home
    async def once(
        self, asked: Any, call: Callable[..., Awaitable[Result]], fields: dict[str, Any] | None = None
    ) -> Result:
        """Result of the sample's next call: from its journal, else of ``call``, which gets its ``call_id`` if the
        tool takes one.

        Args:
            asked: the call's arguments. fields: in which a call may leave something for the reward.
        """
        sample = self.sample
        if sample is None:
            return await self.within(call(**self._own(None)))
        sample.require_life()
        digest = hashlib.blake2b(repr(asked).encode(), digest_size=16).hexdigest()
        number, recorded = sample.next_tool_call(self._name, digest, in_order=self._restore is not None)
        state = sample.tool_states[self._name]
        if recorded is not None and "started" not in recorded:
            state.handle = recorded.get("state", state.handle)
            sample.calls_replayed += 1
            return _replayed(sample, recorded, fields)
        if self._repeatable:
            # The call may take long, so the turn that asks for it is reported now.
            sample.keeper.outbox.report_now(sample)
        entry = _Entry(sample, {"call": number, "tool": self._name, "asked": digest}, fields)
        # Parallel calls that share a state come after one another, so that each journals its own.
        async with state.turn if self._restore is not None else contextlib.nullcontext():
            return await self.within(self._answer(entry, call, cut_off=recorded is not None))

    def _own(self, call_id: str | None) -> dict[str, str | None]:
        """What a call gets beside its arguments."""
        return {"call_id": call_id} if self._named else {}

    async def _answer(self, entry: _Entry, call: Callable[..., Awaitable[Result]], *, cut_off: bool) -> Result:
        """What ``call`` returns, or, if it was ``cut_off`` and the tool knows, what it has returned; journaled."""
        sample, state = entry.sample, entry.sample.tool_states[self._name]
        if cut_off and self._status is not None:
            sample.calls_asked += 1
            found = await self.run(self._status, entry.call_id)
            if found is not None:
                state.in_place = True
                return await self._record(entry, normalize_function_tool_return(found))
        elif cut_off and self._restore is None and not self._repeatable:
            logger.warning("call %s, of %s, was cut off and is not made again", entry.call_id, self._name)
            raise await self._failed(entry, "the call was cut off before its result was known")
        if self._restore is not None and not state.in_place:
            await self.run(self._restore, sample.id, state.handle)
            state.in_place = True
        if not (self._repeatable or cut_off):
            await sample.start_tool_call({**entry.head, "started": True})
        try:
            result = await call(**self._own(entry.call_id))
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # Its time is over, or the sample itself is being ended: there is no answer.
                raise
            raise await self._failed(entry, "the call was cancelled from within") from error
        except Exception as error:
            sample.keeper.outbox.note_error(error)
            await self._journal(entry, error=str(error))
            raise
        return await self._record(entry, result)

    async def _failed(self, entry: _Entry, why: str) -> ToolError:
        """The journaled answer to a call that may have had its effect."""
        error = f"{why}; it may have had its effect, and is not made again"
        await self._journal(entry, error=error)
        return ToolError(error)

    async def _record(self, entry: _Entry, result: Result) -> Result:
        """``result``, journaled."""
        response, reward, metrics = result
        if response.image or response.video:
            raise ValueError(
                f"sample {entry.sample.id}: its tool returned images or video: partial rollout trains text only; "
                f"set partial_rollout.enable=False"
            )
        reward = None if reward is None else float(reward)
        await self._journal(entry, text=response.text, reward=reward, **({"metrics": metrics} if metrics else {}))
        return result

    async def _journal(self, entry: _Entry, **answer: Any) -> None:
        """Journal ``answer``, and the fields that have changed since the call began."""
        sample = entry.sample
        if self._snapshot is not None:
            answer["state"] = await self.run(self._snapshot, sample.id)
        name = f"sample {sample.id}: what tool {self._name} leaves"
        try:
            if changed := entry.changed():
                # The loop goes on changing them.
                answer["fields"] = unpack(pack(changed, name))
            pack(answer, name)
        except UnsaveableError as error:
            sample.add_tool_result({**entry.head, "refused": str(error)})
            raise _refusal(sample, str(error)) from None
        sample.add_tool_result({**entry.head, **answer})


class _Entry:
    """A call that is made, and what the journal will have of it.

    Args:
        head: number, tool, and a digest of the arguments. fields: see ``_Calls.once``.
    """

    def __init__(self, sample: LiveSample, head: dict[str, Any], fields: dict[str, Any] | None) -> None:
        self.sample, self.head, self._fields = sample, head, {} if fields is None else fields
        self.call_id = f"{sample.id}/{head['call']}"
        self._before = {name: _frozen(value) for name, value in self._fields.items()}

    def changed(self) -> dict[str, Any]:
        """The fields that are not as they were when the call began."""
        return {name: value for name, value in self._fields.items() if _frozen(value) != self._before.get(name)}


def _frozen(value: Any) -> Any:
    """``value`` as it is now; itself if it cannot be packed."""
    try:
        return pack(value)
    except UnsaveableError:
        return value


def _refusal(sample: LiveSample, why: str) -> ToolError:
    """Ends ``sample``: to raise would not do, as agent loops turn a tool's exception into its answer."""
    sample.clock.end(refusal := ToolError(why))
    return refusal


def _replayed(sample: LiveSample, recorded: dict[str, Any], fields: dict[str, Any] | None) -> Result:
    if "refused" in recorded:
        raise _refusal(sample, recorded["refused"])
    # Of parallel calls the one that ended last decides.
    for name, value in recorded.get("fields", {}).items():
        if fields is not None and recorded["ended"] > sample.fields_from.get(name, 0):
            fields[name], sample.fields_from[name] = deepcopy(value), recorded["ended"]
    if "error" in recorded:
        raise ToolError(recorded["error"])
    return ToolResponse(text=recorded["text"]), recorded["reward"], recorded.get("metrics", {})


def _journaled_function(tool: FunctionTool, calls: _Calls) -> FunctionTool:
    async def call(**parameters: Any) -> Result:
        async def run(**own: Any) -> Result:
            return normalize_function_tool_return(await calls.run(tool.fn, **{**parameters, **own}))

        return await calls.once(parameters, run)

    return replace(tool, fn=call, is_async=True)


class _NoResponse:
    """Stands for what ``create`` of a tool says, which verl's agent loop does not read."""

    def __init__(self, tool: str) -> None:
        self._tool_name = tool

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"tool {self._tool_name}: its instance is created by its first real call, so what create() says is not known "
            f"here ({name}): let execute() say it"
        )


class JournaledTool(OneOfASample):
    """A ``BaseTool`` behind a journal; everything but its life cycle is the tool's own."""

    def __init__(self, tool: BaseTool, calls: _Calls) -> None:
        super().__init__()
        self._tool = tool
        self._calls = calls
        self._to_create: dict[str, dict[str, Any]] = {}
        self._created: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        """Return an instance id; in training the tool's own instance is created by the first call that is real.

        So there is no response of it yet, and a loop that reads one is refused.
        """
        instance_id = instance_id or uuid4().hex
        if self._calls.sample is None:
            self._created[instance_id], response = await self._calls.within(self._tool.create(instance_id, **kwargs))
            return instance_id, response
        self._to_create[instance_id] = kwargs
        return instance_id, _NoResponse(self._tool.name)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Result:
        """The result of this call: from the journal, else from the tool."""

        async def call(**own: Any) -> Result:
            if instance_id in self._to_create:
                created, _ = await self._tool.create(instance_id, **self._to_create.pop(instance_id))
                self._created[instance_id] = created
            return await self._tool.execute(self._created[instance_id], parameters, **{**kwargs, **own})

        return await self._calls.once(parameters, call, getattr(kwargs.get("agent_data"), "extra_fields", None))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the tool's instance, if one was created."""
        self._to_create.pop(instance_id, None)
        created = self._created.pop(instance_id, None)
        if created is not None:
            await self._calls.within(self._tool.release(created, **kwargs))
