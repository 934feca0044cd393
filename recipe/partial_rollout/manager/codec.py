"""Converts the manager's state to a dictionary of plain Python and numpy values for a checkpoint, and back.

Example::

    {"version": 5, "last_enqueued": "0/9", "admitted": ["0/8"], "filtered": [], "counters": {"admitted_groups": 9, ...},
     "trained": [[7, 120]],         # int64 [group, 2]: dispatch order and response tokens (``Groups.trained``)
     "backlog": [{"uid": "0/9", "row": {...}}],
     "groups": [                    # TAKEN ones first, then READY, then unfinished ones
         {"prompt": {"uid": "0/8", "row": {...}}, "order": 8, "birth": 4, "samples": [
             {"output": {...}, "segments": [], "failures": 0, "error": None},               # finished
             {"output": None, "segments": [{...}], "failures": 1, "error": "KeyError: 'a'"}]}]}  # single-turn

Workers and their conversations are not saved. After a resume a single-turn sample continues from its segments. A
multi-turn sample has none in the dictionary and begins anew; ``counters`` counts its tokens as lost. Its group keeps
its birth, so the bound on staleness still holds. A TAKEN group is restored as READY.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe.partial_rollout.checkpoint.plain_state import pack
from recipe.partial_rollout.manager.types import (
    FilteredGroup,
    GroupState,
    Prompt,
    PromptGroup,
    Sample,
    SampleOutput,
    SampleState,
    Segment,
)

if TYPE_CHECKING:
    from recipe.partial_rollout.manager.prompts_manager import PromptsManager


# -- encoding ----------------------------------------------------------------------------------------------------------


def capture(manager: PromptsManager) -> dict[str, Any]:
    """Return the present state as the dictionary described above, before ``encode`` completes it.

    Segments and outputs are still objects. A READY or TAKEN group has the store's reference to its outputs under
    ``stored``. The call takes milliseconds, because no token is copied: the dictionary shares with the manager only
    objects that never change.

    Do not call it after the next version has begun and before ``finish_step`` of the batch (``Driver.save`` refuses
    that): a resumed run would have to train that batch again, and its version has passed.
    """
    backlog, groups = manager.backlog, manager.groups
    unfinished = groups.in_state(GroupState.WAITING, GroupState.ACTIVE)
    live = manager.samples.unfinished.values()
    lost = sum(len(segment) for sample in live if not sample.lasting_segments for segment in sample.segments)
    return {
        "version": manager.version,
        "last_enqueued": backlog.last_enqueued,
        "admitted": list(groups.admitted),
        "filtered": [asdict(group) for group in groups.filtered],
        "counters": asdict(replace(groups.counters, lost_tokens=groups.counters.lost_tokens + lost)),
        "trained": np.array(list(groups.trained.items()), np.int64).reshape(-1, 2),
        "backlog": [_fields(prompt) for prompt in backlog.prompts],
        "groups": [
            {
                "prompt": _fields(group.prompt),
                "order": group.order,
                "birth": group.birth,
                "stored": group.stored,
                "samples": [
                    {
                        "segments": list(sample.lasting_segments),
                        "failures": sample.failures,
                        "error": sample.error,
                        "output": sample.output,
                    }
                    for sample in group.samples
                ],
            }
            for group in [*groups.taken, *groups.ready_queue, *unfinished]
        ],
    }


def check_saveable(sample_id: str, output: SampleOutput) -> None:
    """Raise ``UnsaveableError`` for a value in ``output`` that a checkpoint cannot hold."""
    pack(_fields(output), f"sample {sample_id}")


def encode(
    captured: dict[str, Any], fetch: Callable[[Mapping[str, Any]], Mapping[str, Sequence[SampleOutput]]]
) -> dict[str, Any]:
    """Complete ``captured`` in place and return it.

    Outputs of groups that have a ``stored`` reference are fetched. Segments and outputs become dictionaries of their
    fields.

    Args:
        captured: the dictionary that ``capture`` returned.
        fetch: takes references to the outputs of groups, by uid, and returns the outputs (``RayObjects.fetch``).
    """
    stored = {group["prompt"]["uid"]: group.pop("stored") for group in captured["groups"]}
    fetched = fetch({uid: outputs for uid, outputs in stored.items() if outputs is not None})
    for group in captured["groups"]:
        for sample, output in zip(group["samples"], fetched.get(group["prompt"]["uid"], ()), strict=False):
            sample["output"] = output
        for sample in group["samples"]:
            sample["segments"] = [_fields(segment) for segment in sample["segments"]]
            if (output := sample["output"]) is not None:
                sample["output"] = _fields(output)
    return captured


def _fields(record: Prompt | Segment | SampleOutput) -> dict[str, Any]:
    """Return the fields of ``record`` by name. ``dataclasses.asdict`` would copy every token."""
    found = {each.name: getattr(record, each.name) for each in fields(record)}
    if isinstance(record, SampleOutput):
        found["earlier"] = [_fields(row) for row in record.earlier]
    return found


# -- decoding ----------------------------------------------------------------------------------------------------------


def restore(manager: PromptsManager, state: dict[str, Any]) -> None:
    """Load the encoded ``state`` into a new ``manager``. Any worker can then claim any unfinished sample.

    Whether the source has prompts left is not restored, because the resumed run may have more steps than the saved one.
    So the manager wants prompts again.
    """
    backlog, groups = manager.backlog, manager.groups
    manager.version = state["version"]
    backlog.prompts.extend(Prompt(**row) for row in state["backlog"])
    backlog.last_enqueued = state["last_enqueued"]
    for name, total in state["counters"].items():
        setattr(groups.counters, name, total)
    groups.trained = dict(state["trained"].tolist())
    groups.admitted = list(state["admitted"])
    groups.filtered = [FilteredGroup(**row) for row in state["filtered"]]
    groups.restore(_groups(state))
    for group in groups.by_order.values():
        manager.enter(group)


def _groups(state: dict[str, Any]) -> Iterator[PromptGroup]:
    for row in state["groups"]:
        group = PromptGroup(Prompt(**row["prompt"]), row["order"], birth=row["birth"])
        group.samples += [_sample(f"{group.uid}#{i}", group, saved) for i, saved in enumerate(row["samples"])]
        yield group


def _sample(sample_id: str, group: PromptGroup, saved: dict[str, Any]) -> Sample:
    output = None if saved["output"] is None else _output(saved["output"])
    state = SampleState.WAITING if output is None else SampleState.FINISHED
    segments = [Segment(**fields) for fields in saved["segments"]]
    return Sample(sample_id, group, state, **{**saved, "segments": segments, "output": output})


def _output(saved: dict[str, Any]) -> SampleOutput:
    # A checkpoint of an earlier version of the recipe has single rows.
    return SampleOutput(**{**saved, "earlier": tuple(map(_output, saved.get("earlier", ())))})
