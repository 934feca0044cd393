"""``ManagerState`` as plain Python and numpy, and back.

Layout of the dictionary: scalars and ``counters``, ``trained``, ``filtered``; ``reserve``, prompts of ``{uid, epoch, row}``
each; ``groups``, of ``{prompt, order, birth, samples}`` each: with the trainer, then ready, then unfinished. A sample has
its journal (``segments``, ``tool_results``), ``failures``, ``error`` and, once it has finished, its ``output``. Arrays
that repeat themselves, masks and versions, are run-length coded.

Workers are left out: a running sample is restored as interrupted, and a group that the trainer had taken but not
acknowledged is restored as ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError, pack
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

LAYOUT = 5

Fetch = Callable[[Sequence[FinishedOutput]], Sequence[SampleOutput]]

_RUNS = ("response_mask", "versions")
"""fields of ``SampleOutput`` that are run-length coded"""


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
        pack(_fields(output))
    except UnsaveableError as error:
        raise error.within(f"sample {sample_id}") from None


def encode(captured: Captured, fetch: Fetch = outputs_here) -> dict[str, Any]:
    """The dictionary described above; ``fetch`` brings the outputs from where they are stored."""
    samples = [sample for group in captured.groups for sample in group.samples]
    outputs = iter(fetch([sample.output for sample in samples if sample.output is not None]))
    return {
        **captured.head,
        "reserve": [_prompt_fields(prompt) for prompt in captured.reserve],
        "groups": [
            {
                "prompt": _prompt_fields(group.prompt),
                "order": group.order,
                "birth": group.birth,
                "samples": [_sample_fields(s, next(outputs) if s.output is not None else None) for s in group.samples],
            }
            for group in captured.groups
        ],
    }


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    return {"uid": prompt.uid, "epoch": prompt.epoch, "row": prompt.row}


def _sample_fields(sample: Sample, output: SampleOutput | None) -> dict[str, Any]:
    return {
        "segments": [_fields(segment) for segment in sample.segments],
        "tool_results": sample.tool_results,
        "failures": sample.failures,
        "error": sample.error,
        "output": None if output is None else _fields(output) | {name: _runs(getattr(output, name)) for name in _RUNS},
    }


def _fields(record: Segment | SampleOutput) -> dict[str, Any]:
    """Its fields by name; ``asdict`` would copy every token."""
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _runs(values: np.ndarray) -> dict[str, np.ndarray]:
    """Run-length code of ``values``."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else np.empty(0, np.int64)
    return {"values": values[starts], "lengths": np.diff(starts, append=len(values))}


# -- decoding ----------------------------------------------------------------------------------------------------------


def decode(state: dict[str, Any], samples_per_group: int, into: ManagerState) -> None:
    """Fill ``into``, which is empty, with the encoded state; no sample has an owner afterwards.

    The source is open again: a resumed training may have more steps than the one that drained.

    Raises:
        ValueError: the layout is another, or a group has another number of samples.
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
    groups.restore(_groups(state, samples_per_group))


def _groups(state: dict[str, Any], size: int) -> Iterator[PromptGroup]:
    for row in state["groups"]:
        group = PromptGroup(Prompt(**row["prompt"]), row["order"], birth=row["birth"])
        if len(row["samples"]) != size:
            raise ValueError(f"manager state: group {group.uid} has {len(row['samples'])} samples: {size}")
        group.samples += [_sample(f"{group.uid}#{i}", group, **fields) for i, fields in enumerate(row["samples"])]
        yield group


def _sample(
    name: str, group: PromptGroup, segments: list[dict[str, Any]], output: dict[str, Any] | None, **plain: Any
) -> Sample:
    return Sample(
        id=name,
        group=group,
        state=SampleState.WAITING if output is None else SampleState.FINISHED,
        segments=[Segment(**fields) for fields in segments],
        output=None if output is None else _output(output),
        **plain,
    )


def _output(saved: dict[str, Any]) -> SampleOutput:
    runs: dict[str, Any] = {name: np.repeat(saved[name]["values"], saved[name]["lengths"]) for name in _RUNS}
    return SampleOutput(**{**saved, **runs})
