"""The manager's state as plain Python and numpy, and back.

Layout of the dictionary: scalars and ``counters``, ``trained``, ``filtered``; ``backlog``, prompts of ``{uid, row}`` each;
``groups``, of ``{prompt, order, birth, samples}`` each: with the trainer, then ready, then unfinished. A sample has
``failures``, ``error``, its ``output`` once it has finished, and until then its ``segments`` if it is single-turn.

Workers and their conversations are left out: a single-turn sample goes on from its tokens, a multi-turn sample begins
anew, and ``counters`` has its tokens as lost. Its group keeps its birth, so it is trained within the bound all the same. A
group that the trainer had taken but not acknowledged is restored as ready.
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
    """Return the present state as the dictionary described above, but with segments and outputs as the manager has them.

    ``stored`` of a READY group stands for its outputs. It takes milliseconds, because no token is copied: objects that
    the dictionary shares with the manager never change.

    Do not call it after the next version has begun and before the batch is trained (``Driver.save``): a restored run
    would have to train that batch again, under a version that is gone.
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

    The outputs of stored groups are put in. Segments and outputs become dictionaries of their fields.

    Args:
        captured: the dictionary that ``capture`` returned.
        fetch: returns the outputs of the stored groups that it is given, by uid.
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
    """Its fields by name; ``asdict`` would copy every token."""
    found = {each.name: getattr(record, each.name) for each in fields(record)}
    if isinstance(record, SampleOutput):
        found["earlier"] = [_fields(row) for row in record.earlier]
    return found


# -- decoding ----------------------------------------------------------------------------------------------------------


def restore(manager: PromptsManager, state: dict[str, Any]) -> None:
    """Load the encoded state into a new ``manager``. Its unfinished samples can be claimed; no worker owns any of them.

    The manager asks its source for prompts again, even if the saved run had reached the end of its steps. The resumed
    run may have more steps.
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
