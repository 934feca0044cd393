"""vLLM's schedulers, which send the tokens of a request in pieces where its caller reads the last output alone.

vLLM sends each token of each request by itself, with its log-probs in three small arrays. The front end, one Python thread,
decodes and processes them: seven tenths of what it does for a token. A GPU that is quicker than that thread builds up a
queue of outputs, behind which an interruption waits for its tokens. ``stream_interval`` does not help: it is applied after
the work.

``scheduler_cls=vllm_plugin.PIECEWISE``, vLLM's own option, sends pieces of ``PIECE_TOKENS``. Exactly the same tokens and
log-probs arrive, later by at most ``PIECE_S`` and a step of their request: with its end, with whatever else there is to say
of it, and all of them before a pause with ``keep`` is complete. A pause with ``abort`` ends requests without asking the
scheduler, so it must follow one with ``keep``; an abort by id loses what is not yet sent.

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
"""seconds after which the request's next token is not kept back: counts of running tokens stay true where steps are slow"""
NEVER = 0
"""tokens of the next piece, for a request that is not sent in pieces"""
_JOINED = frozenset({"request_id", "new_token_ids", "new_logprobs"})
"""fields of an output that a piece keeps for every step"""
_REPEATED = frozenset({"trace_headers"})
"""fields of an output that the next one of its request repeats"""
_ENVELOPE = frozenset({"engine_index", "outputs", "timestamp"})
"""fields of a message that nobody reads where it has no outputs"""


class Piece:
    """Tokens of a request that are kept back: an output, and the log-probs of the steps that it stands for."""

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
        """``output``, this piece's own or a later one, with all tokens kept back and their log-probs."""
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
        """tokens of the next piece, by request; none before its first output"""
        self._turn = 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """As vLLM's, less what is kept back."""
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
        """``output`` with what was kept back before it; None if it is kept back itself."""
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
        """Its tokens: more for each request in turn, so that those which begin together do not send together."""
        request = self.requests.get(name)
        if request is None or request.sampling_params is None or request.resumable:
            return NEVER
        # Stop strings are looked for in the front end.
        if request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY or request.sampling_params.stop:
            return NEVER
        self._turn = self._turn % PIECE_TOKENS + 1
        return self._turn

    def has_finished_requests(self) -> bool:
        """As vLLM's; a pause with ``keep`` takes one step more while tokens are kept back."""
        return super().has_finished_requests() or (self.pause_state is PauseState.PAUSED_ALL and bool(self._kept))

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        """As vLLM's. An aborted request has no further output; one that fails has."""
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
    """(name, value where nothing is said) of each field; ``NODEFAULT``, which no value is, for a field that is required."""
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    required = [NODEFAULT] * (len(names) - len(defaults))
    return list(zip(names, (*required, *defaults), strict=True))


class PiecewiseAsyncScheduler(PiecewiseScheduler, AsyncScheduler):
    """vLLM's ``AsyncScheduler``, in pieces."""


def piecewise_scheduler(vllm_config: Any, **parts: Any) -> Scheduler:
    """The scheduler that vLLM would choose, in pieces.

    vLLM resolves ``scheduler_cls`` by its name and calls it; which of its classes it is depends on what the engine decides
    later (``async_scheduling``).
    """
    asynchronous = vllm_config.scheduler_config.async_scheduling
    return (PiecewiseAsyncScheduler if asynchronous else PiecewiseScheduler)(vllm_config=vllm_config, **parts)
