"""``ManagerState`` as plain Python and numpy, and back: columns rather than one record a token.

Layout of the dictionary (S samples, group by group; E engine calls of the unfinished ones; O outputs of the finished):

================= ==============================================================================================
``version`` ...   scalars, ``counters``, ``trained``, ``filtered``
``reserve``       prompts, ``{uid, epoch, row}`` each
``groups``        ``{prompt, order, birth}`` each: with the trainer, then ready, then unfinished
``samples``       columns of length S: ``finished``, ``failures``, ``error``, ``tool_results``, ``calls``
``calls``         columns of length E: ``length`` and the other fields of ``Segment``
``outputs``       columns of length O: ``prompt_length``, ``response_length`` and the fields of ``SampleOutput``
``tokens``        int32: of every call, then prompt and response of every output
``log_probs``     float32: of every call, then of every response
``mask``          run-length over the responses, as are ``versions``
================= ==============================================================================================

Workers are left out: a running sample is restored as interrupted, and a group that the trainer had taken but not
acknowledged is restored as ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError, pack
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.groups import Counters, ManagerState
from recipe.partial_rollout.manager.types import (
    FilteredGroup,
    FinishedOutput,
    GroupState,
    Prompt,
    PromptGroup,
    Sample,
    SampleOutput,
    SampleState,
    Segment,
)

LAYOUT = 4

Fetch = Callable[[Sequence[FinishedOutput]], Sequence[SampleOutput]]

_PLAIN_OUTPUT_FIELDS = (
    "segments",
    "reward_score",
    "reward_extra_info",
    "num_turns",
    "metrics",
    "extra_fields",
    "masked",
)


@dataclass(frozen=True, slots=True)
class Captured:
    """The manager's state at one moment; shares only data that the manager never changes, such as tokens."""

    head: dict[str, Any]
    reserve: tuple[Prompt, ...]
    groups: tuple[PromptGroup, ...]


def capture(state: ManagerState) -> Captured:
    """Capture ``state`` as it is now; takes milliseconds, because no token is copied."""
    groups = state.groups
    head = {
        "layout": LAYOUT,
        "version": state.version,
        "source_open": state.reserve.source_open,
        "last_offered": state.reserve.last_offered,
        "admitted": list(groups.admitted),
        "filtered": [asdict(group) for group in groups.filtered],
        "counters": asdict(groups.counters),
        "trained": np.array(list(groups.trained.items()), np.int64).reshape(-1, 2),
    }
    unfinished = groups.in_state(GroupState.WAITING, GroupState.ACTIVE)
    captured = tuple(_copy(group) for group in [*groups.taken.values(), *groups.ready_queue, *unfinished])
    return Captured(head, tuple(state.reserve), captured)


def _copy(group: PromptGroup) -> PromptGroup:
    samples = [replace(s, segments=list(s.segments), tool_results=list(s.tool_results)) for s in group.samples]
    return replace(group, samples=samples)


# -- encoding ----------------------------------------------------------------------------------------------------------


def outputs_here(outputs: Sequence[FinishedOutput]) -> list[SampleOutput]:
    """``outputs`` as they are, for a manager without an output store."""
    here = [output for output in outputs if isinstance(output, SampleOutput)]
    assert len(here) == len(outputs)
    return here


def check_saveable(sample_id: str, output: SampleOutput) -> None:
    """Raise ``UnsaveableError`` for a value in ``output`` that a checkpoint cannot hold."""
    try:
        pack({name: getattr(output, name) for name in _PLAIN_OUTPUT_FIELDS})
    except UnsaveableError as error:
        raise error.within(f"sample {sample_id}") from None


def encode(captured: Captured, fetch: Fetch = outputs_here) -> dict[str, Any]:
    """The dictionary described above; ``fetch`` brings the outputs from where they are stored."""
    samples = [sample for group in captured.groups for sample in group.samples]
    calls = [segment for sample in samples for segment in sample.segments]
    outputs = fetch([sample.output for sample in samples if sample.output is not None])
    tokens = [call.token_ids for call in calls] + [part for o in outputs for part in (o.prompt_ids, o.response_ids)]
    log_probs = [call.log_probs for call in calls] + [o.log_probs for o in outputs]
    return {
        **captured.head,
        "reserve": [_prompt_fields(prompt) for prompt in captured.reserve],
        "groups": [{"prompt": _prompt_fields(g.prompt), "order": g.order, "birth": g.birth} for g in captured.groups],
        "samples": {
            "finished": np.array([s.output is not None for s in samples], np.bool_),
            "failures": np.array([s.failures for s in samples], np.int32),
            "error": [s.error for s in samples],
            "tool_results": [s.tool_results for s in samples],
            "calls": np.array([len(s.segments) for s in samples], np.int32),
        },
        "calls": {
            "length": np.array([len(call) for call in calls], np.int32),
            "version": np.array([call.version for call in calls], np.int32),
            "stop_reason": [call.stop_reason for call in calls],
            "turn": np.array([call.turn for call in calls], np.int32),
            "asked": [call.asked for call in calls],
        },
        "outputs": {
            "prompt_length": np.array([len(o.prompt_ids) for o in outputs], np.int32),
            "response_length": np.array([o.response_length for o in outputs], np.int32),
            **{name: [getattr(o, name) for o in outputs] for name in _PLAIN_OUTPUT_FIELDS},
        },
        "tokens": _joined(tokens, np.int32),
        "log_probs": _joined(log_probs, np.float32),
        "mask": _runs(_joined([o.response_mask for o in outputs], np.int8)),
        "versions": _runs(_joined([o.versions for o in outputs], np.int32)),
    }


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    return {"uid": prompt.uid, "epoch": prompt.epoch, "row": prompt.row}


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(parts, dtype=dtype) if parts else np.empty(0, dtype)


def _runs(values: np.ndarray) -> dict[str, np.ndarray]:
    """Run-length code of ``values``."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else np.empty(0, np.int64)
    return {"values": values[starts], "lengths": np.diff(starts, append=len(values))}


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode(state: dict[str, Any], admission: Admission, into: ManagerState) -> None:
    """Fill ``into``, which is empty, with the encoded state; no sample has an owner afterwards.

    The source is open again: a resumed training may have more steps than the one that drained.

    Raises:
        ValueError: the layout is another, or the columns do not fit together.
    """
    if state.get("layout") != LAYOUT:
        raise ValueError(f"manager state has layout={state.get('layout')}: this version of the recipe reads {LAYOUT}")
    into.version = state["version"]
    into.reserve.prompts.extend(Prompt(**row) for row in state["reserve"])
    into.reserve.last_offered = state["last_offered"]
    groups = into.groups
    groups.counters, groups.trained = Counters(**state["counters"]), dict(state["trained"].tolist())
    groups.admitted = list(state["admitted"])
    groups.filtered = [FilteredGroup(**row) for row in state["filtered"]]
    groups.restore(_groups(state, admission.samples_per_group))


def _groups(state: dict[str, Any], size: int) -> Iterator[PromptGroup]:
    records = _samples(state)
    for row in state["groups"]:
        group = PromptGroup(Prompt(**row["prompt"]), row["order"], birth=row["birth"])
        for index in range(size):
            group.samples.append(replace(next(records), id=f"{group.uid}#{index}", group=group))
        yield group


def _samples(state: dict[str, Any]) -> Iterator[Sample]:
    """Every sample, in the order of the groups; the caller fills in id and group."""
    calls, outputs = _calls_and_outputs(state)
    columns = state["samples"]
    for finished, failures, error, results, count in zip(
        columns["finished"].tolist(),
        columns["failures"].tolist(),
        columns["error"],
        columns["tool_results"],
        columns["calls"].tolist(),
        strict=True,
    ):
        yield Sample(
            id="",
            group=None,  # type: ignore[arg-type]
            state=SampleState.FINISHED if finished else SampleState.WAITING,
            segments=[next(calls) for _ in range(count)],
            tool_results=list(results),
            failures=failures,
            error=error,
            output=next(outputs) if finished else None,
        )


def _calls_and_outputs(state: dict[str, Any]) -> tuple[Iterator[Segment], Iterator[SampleOutput]]:
    calls, outputs = state["calls"], state["outputs"]
    responses = outputs["response_length"]
    both = np.stack([outputs["prompt_length"], responses], axis=1).ravel()
    tokens = _pieces("tokens", state["tokens"], np.concatenate([calls["length"], both]))
    log_probs = _pieces("log_probs", state["log_probs"], np.concatenate([calls["length"], responses]))
    masks = _pieces("mask", _spread("mask", state["mask"], np.int8, responses), responses)
    versions = _pieces("versions", _spread("versions", state["versions"], np.int32, responses), responses)
    count = len(calls["length"])
    plain_calls = calls["version"].tolist(), calls["stop_reason"], calls["turn"].tolist(), calls["asked"]
    segments = map(Segment, tokens[:count], log_probs[:count], *plain_calls)
    plain = zip(*(outputs[name] for name in _PLAIN_OUTPUT_FIELDS), strict=True)
    parts = zip(tokens[count::2], tokens[count + 1 :: 2], masks, log_probs[count:], versions, plain, strict=True)
    return segments, (
        SampleOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=mask,
            log_probs=probs,
            versions=version,
            **dict(zip(_PLAIN_OUTPUT_FIELDS, rest, strict=True)),
        )
        for prompt, response, mask, probs, version, rest in parts
    )


def _pieces(name: str, joined: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != len(joined) or (lengths < 0).any():
        raise ValueError(f"manager state: {name} has {len(joined)} entries: {ends[-1] if ends else 0} by its lengths")
    return [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _spread(name: str, runs: dict[str, np.ndarray], dtype: Any, lengths: np.ndarray) -> np.ndarray:
    total = int(lengths.sum(dtype=np.int64))
    if (runs["lengths"] < 0).any() or int(runs["lengths"].sum(dtype=np.int64)) != total:
        raise ValueError(f"manager state: {name} has runs of {runs['lengths'].sum()} entries: {total}")
    return np.repeat(runs["values"].astype(dtype, copy=False), runs["lengths"])
