"""Storage for the outputs of finished samples between the manager, which needs no tokens, and the trainer.

The manager stores outputs as they arrive, in objects of about 2 MB, and keeps a reference to and the metadata of each
output; the trainer gets the references and reads the arrays in place. An object in Ray's store dies with the process
that put it there, and a worker may die before its samples are trained, so only the manager's process puts objects. An
object is freed once the last of its samples has been trained.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from recipe.partial_rollout.manager.codec import Fetch, InProcess
from recipe.partial_rollout.manager.types import (
    FinishedOutput,
    RolloutFailedError,
    SampleOutput,
    StoredOutput,
    TakenGroup,
)
from recipe.partial_rollout.waits import one_line


@dataclass(frozen=True, slots=True)
class _Columns:
    """Outputs as stored in one object: their arrays end to end, so that 40 outputs are read as fast as one."""

    lengths: list[tuple[int, int]]
    """prompt and response tokens of each output"""
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    response_mask: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    plain: list[tuple[Any, ...]]
    """the other fields of ``SampleOutput``, in its order"""

    @classmethod
    def of(cls, outputs: Sequence[SampleOutput]) -> _Columns:
        """Columns of ``outputs``; copies their arrays."""
        arrays = {name: np.concatenate([getattr(output, name) for output in outputs]) for name in _ARRAYS}
        lengths = [(len(output.prompt_ids), len(output.response_ids)) for output in outputs]
        return cls(lengths, **arrays, plain=[tuple(getattr(output, name) for name in _PLAIN) for output in outputs])

    def outputs(self) -> list[SampleOutput]:
        """The outputs in the order in which they were put; their arrays are views."""
        result, p, r = [], 0, 0
        for (prompt, response), plain in zip(self.lengths, self.plain, strict=True):
            of = slice(r, r + response)
            prompt_ids = self.prompt_ids[p : p + prompt]
            arrays = self.response_ids[of], self.response_mask[of], self.log_probs[of], self.versions[of]
            result.append(SampleOutput(prompt_ids, *arrays, *plain))
            p, r = p + prompt, r + response
        return result


_ARRAYS = ("prompt_ids", "response_ids", "response_mask", "log_probs", "versions")
_PLAIN = tuple(f.name for f in fields(SampleOutput) if f.name not in _ARRAYS)


@dataclass(slots=True, eq=False)
class _Bundle:
    """Outputs that become one object: held here until it is sealed, then only a reference."""

    outputs: list[SampleOutput] = field(default_factory=list)
    size: int = 0
    """bytes of the outputs' arrays"""
    reference: Any = None
    """Ray reference to the ``_Columns``"""


class RayObjects:
    """Ray's object store: only the manager calls ``put`` and ``seal``; whoever has the references may call ``fetch``.

    A handle is a ``_Bundle`` and the output's index in it.

    Args:
        deadline_s: seconds for all the outputs of one ``fetch``.
    """

    OBJECT_BYTES = 2 * 2**20
    """smallest size of an object, unless it is sealed early; each object costs its reader about 0.1 ms"""
    OBJECTS = 256
    """objects that one ``ray.get`` fetches: other work of the process need not wait for all of them"""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._open = _Bundle()

    def put(self, finished: Sequence[tuple[str, SampleOutput]]) -> list[StoredOutput]:
        """Add outputs to the object that is being filled."""
        stored = []
        for sample_id, output in finished:
            bundle = self._open
            handle = bundle, len(bundle.outputs)
            metadata = output.response_length, output.reward_score, output.reward_extra_info, output.masked
            stored.append(StoredOutput(sample_id, handle, *metadata))
            bundle.outputs.append(output)
            bundle.size += sum(getattr(output, name).nbytes for name in _ARRAYS)
            if bundle.size >= self.OBJECT_BYTES:
                self.seal()
        return stored

    def seal(self) -> None:
        """Put the outputs collected so far as one object; Ray keeps objects under 100 KB inside the manager's process."""
        if not self._open.outputs:
            return
        bundle, self._open = self._open, _Bundle()
        bundle.reference = ray.put(_Columns.of(bundle.outputs))
        bundle.outputs = []

    def fetch(self, outputs: Sequence[FinishedOutput]) -> list[SampleOutput]:
        """Fetch outputs, and block meanwhile; arrays from objects above 100 KB are read-only views of the store.

        Raises:
            RolloutFailedError: outputs were lost with the node that stored them, or with the manager.
            TimeoutError: they did not arrive within the deadline.
        """
        until = time.monotonic() + self._deadline_s
        references = list(dict.fromkeys(_reference(output) for output in outputs if isinstance(output, StoredOutput)))
        found: dict[Any, list[SampleOutput]] = {}
        for start in range(0, len(references), self.OBJECTS):
            chunk = references[start : start + self.OBJECTS]
            try:
                columns = ray.get(chunk, timeout=max(0.0, until - time.monotonic()))
            except GetTimeoutError:
                late = _samples_of(outputs, ray.wait(references, num_returns=len(references), timeout=0)[1] or chunk)
                raise TimeoutError(
                    f"fetching the outputs of finished samples took more than {self._deadline_s:g} s "
                    f"(partial_rollout.deadlines.interrupt_s); awaited: {late}"
                ) from None
            except ObjectLostError as error:
                gone = _samples_of(outputs, [ref for ref in chunk if ref.hex() == error.object_ref_hex] or chunk)
                raise RolloutFailedError(
                    f"outputs of finished samples are lost: {gone}; resume from the last checkpoint "
                    f"(trainer.resume_mode=auto): {one_line(error)}"
                ) from error
            found.update((reference, c.outputs()) for reference, c in zip(chunk, columns, strict=True))
        return [
            found[_reference(output)][output.handle[1]] if isinstance(output, StoredOutput) else output
            for output in outputs
        ]


OutputStore = InProcess | RayObjects


def _reference(output: StoredOutput) -> Any:
    bundle, _ = output.handle
    assert bundle.reference is not None
    return bundle.reference


def _samples_of(outputs: Sequence[FinishedOutput], references: Sequence[Any], limit: int = 8) -> str:
    """Ids of the samples whose outputs are in ``references``, at most ``limit``."""
    among = set(references)
    names = [output.sample_id for output in outputs if isinstance(output, StoredOutput) and _reference(output) in among]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def fetch_groups(groups: Sequence[TakenGroup[FinishedOutput]], fetch: Fetch) -> list[TakenGroup]:
    """``groups`` with their outputs in place of what the manager held."""
    outputs = iter(fetch([output for group in groups for output in group.outputs]))
    fetched = [replace(group, outputs=tuple(itertools.islice(outputs, len(group.outputs)))) for group in groups]
    return cast("list[TakenGroup]", fetched)
