"""vLLM's schedulers, changed to send a request's tokens in pieces if its caller reads only the last output.

vLLM sends each token of each request by itself, with its log-probs in three small arrays. The front end, one Python
thread, decodes and processes each of these; that is seven tenths of its work for a token. If the GPU is quicker than
this thread, outputs queue up, and an interruption waits for the tokens in the queue. vLLM's ``stream_interval`` does
not help, because it applies after this work.

``scheduler_cls=vllm_plugin.PIECEWISE``, an option of vLLM's own, makes pieces of ``PIECE_TOKENS`` tokens. Exactly the
same tokens and log-probs arrive, later by at most ``PIECE_S`` and one step of their request. Tokens kept back are sent
at once with the request's end, and with any output that says more than tokens. All are sent before a pause with
``keep`` is complete. A pause with ``abort`` ends requests without asking the scheduler, so it must follow a pause with
``keep``. An abort by id loses the tokens that are not yet sent.

It may go when an option of vLLM does this.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
from msgspec import NODEFAULT, Struct
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

PIECE_TOKENS = 16
PIECE_S = 0.1
"""age in seconds from which a piece is sent with the request's next token, so that counts of tokens stay true if steps
are slow"""
NEVER = 0
"""in the place of the tokens of the next piece: this request is not sent in pieces"""
_JOINED = frozenset({"request_id", "new_token_ids", "new_logprobs"})
"""fields of an output that a piece holds for all of its steps"""
_REPEATED = frozenset({"trace_headers"})
"""fields that every output of a request repeats, so that a piece may drop them"""
_ENVELOPE = frozenset({"engine_index", "outputs", "timestamp"})
"""fields of a message that mean nothing without outputs: a message with no other field set is not sent"""


class Piece:
    """Tokens of a request that are kept back: one output with the tokens of all steps, and each step's log-probs."""

    __slots__ = ("began", "client", "log_probs", "output")

    def __init__(self, output: EngineCoreOutput, client: int, began: float) -> None:
        self.output, self.client, self.began = output, client, began
        self.log_probs = [] if output.new_logprobs is None else [output.new_logprobs]

    def add(self, output: EngineCoreOutput) -> None:
        """Append the tokens of a later step."""
        self.output.new_token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.log_probs.append(output.new_logprobs)

    def into(self, output: EngineCoreOutput) -> EngineCoreOutput:
        """Put all tokens kept back and their log-probs into ``output`` (the piece's own or a later one); return it."""
        output.new_token_ids = self.output.new_token_ids
        if self.log_probs:
            ids, values, ranks, _ = zip(*self.log_probs, strict=True)
            output.new_logprobs = LogprobsLists(np.concatenate(ids), np.concatenate(values), np.concatenate(ranks))
        return output


class PiecewiseScheduler(Scheduler):
    """vLLM's ``Scheduler``, in pieces."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[str, Piece] = {}
        self._due: dict[str, int] = {}
        """size in tokens of the next piece, by request; a request has no entry before its first output"""
        self._turn = 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """Do as vLLM's, but leave out the tokens that are kept back, and add earlier ones that are now sent."""
        now = time.monotonic()
        messages = super().update_from_output(scheduler_output, model_runner_output)
        for client, message in messages.items():
            passed = [self._pass(output, client, now) for output in message.outputs]
            message.outputs = [output for output in passed if output is not None]
        if self.pause_state is PauseState.PAUSED_ALL:
            for piece in self._kept.values():
                messages.setdefault(piece.client, EngineCoreOutputs(outputs=[])).outputs.append(
                    piece.into(piece.output)
                )
            self._kept.clear()
        return {client: message for client, message in messages.items() if _says_something(message)}

    def _pass(self, output: EngineCoreOutput, client: int, now: float) -> EngineCoreOutput | None:
        """Return ``output`` with the tokens that were kept back before it; None if it is now kept back, too."""
        name = output.request_id
        due = self._due.get(name)
        if output.finish_reason is not None:
            self._due.pop(name, None)
            due = NEVER
        elif due is None:
            # The end of its prefill: when it comes is a figure of vLLM's statistics.
            self._due[name] = self._first_piece(name)
            return output
        piece = self._kept.pop(name, None)
        if piece is not None:
            piece.add(output)
        elif due == NEVER:
            return output
        else:
            piece = Piece(output, client, now)
        if len(piece.output.new_token_ids) < due and now - piece.began < PIECE_S and not _says_more(output):
            self._kept[name] = piece
            return None
        if due != NEVER:
            self._due[name] = PIECE_TOKENS
        return piece.into(output)

    def _first_piece(self, name: str) -> int:
        """Return the size in tokens of the first piece of request ``name``, or ``NEVER``.

        It goes from 1 to ``PIECE_TOKENS`` over the requests, so that requests that begin together do not send together.
        """
        request = self.requests.get(name)
        if request is None or request.sampling_params is None or request.resumable:
            return NEVER
        # Stop strings are looked for in the front end.
        if request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY or request.sampling_params.stop:
            return NEVER
        self._turn = self._turn % PIECE_TOKENS + 1
        return self._turn

    def has_finished_requests(self) -> bool:
        """Do as vLLM's, but also return True while a pause with ``keep`` finds tokens kept back.

        vLLM then makes one more step, which sends them.
        """
        return super().has_finished_requests() or (self.pause_state is PauseState.PAUSED_ALL and bool(self._kept))

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        """Do as vLLM's, and drop the tokens kept back of aborted requests.

        Requests that fail have one more output, which sends them.
        """
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED:
            for name in [name for name in self._due if name not in self.requests or self.requests[name].is_finished()]:
                del self._due[name]
                self._kept.pop(name, None)
        return finished


def _says_more(output: EngineCoreOutput) -> bool:
    """Whether an output says more than tokens and their log-probs: also in a field that a later release has added."""
    return _has_beside(output, _JOINED | _REPEATED)


def _says_something(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs) or _has_beside(message, _ENVELOPE)


def _has_beside(record: Struct, known: frozenset[str]) -> bool:
    """Whether ``record`` has a value in a field that is not ``known``."""
    return any(getattr(record, name) is not default for name, default in _defaults(type(record)) if name not in known)


@cache
def _defaults(kind: type[Struct]) -> list[tuple[str, Any]]:
    """Return (name, default) of each field; ``NODEFAULT``, which equals no value, for a required field."""
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    required = [NODEFAULT] * (len(names) - len(defaults))
    return list(zip(names, (*required, *defaults), strict=True))


class PiecewiseAsyncScheduler(PiecewiseScheduler, AsyncScheduler):
    """vLLM's ``AsyncScheduler``, in pieces."""


def piecewise_scheduler(vllm_config: Any, **parts: Any) -> Scheduler:
    """Make the scheduler that vLLM would choose, in pieces.

    vLLM finds ``scheduler_cls`` by its name and calls it. It is a function because only then the engine has decided
    between vLLM's two classes (``async_scheduling``).
    """
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (PiecewiseAsyncScheduler if asynchronous else PiecewiseScheduler)(vllm_config=vllm_config, **parts)
