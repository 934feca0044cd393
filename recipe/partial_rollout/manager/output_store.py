"""Storage for the outputs of READY groups between the manager, which needs no tokens, and the trainer.

An object in Ray's store dies with the process that put it there, and a worker may die before its samples are trained, so
the manager's process puts them: one object a group, freed once the group is trained.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from recipe.partial_rollout.manager.types import RolloutFailedError, SampleOutput
from recipe.partial_rollout.waits import one_line


class RayObjects:
    """Ray's object store: only the manager calls ``put``; whoever has the references may call ``fetch``.

    Args:
        deadline_s: seconds for all the outputs of one ``fetch``.
    """

    OBJECTS = 256
    """objects that one ``ray.get`` fetches: other work of the process need not wait for all of them"""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def put(self, outputs: Sequence[SampleOutput]) -> Any:
        """Store the outputs of a group; returns the reference. Ray keeps objects under 100 KB inside this process."""
        return ray.put(outputs)

    def fetch(self, stored: Mapping[str, Any]) -> dict[str, Sequence[SampleOutput]]:
        """The outputs by group, of which ``stored`` has the references; blocks meanwhile.

        Arrays from objects above 100 KB are read-only views of the store.

        Raises:
            RolloutFailedError: outputs were lost with the node that stored them, or with the manager.
            TimeoutError: they did not arrive within the deadline.
        """
        until = time.monotonic() + self._deadline_s
        fetched: dict[str, Sequence[SampleOutput]] = {}
        groups = iter(stored.items())
        while chunk := dict(itertools.islice(groups, self.OBJECTS)):
            references = list(chunk.values())
            try:
                outputs = ray.get(references, timeout=max(0.0, until - time.monotonic()))
            except GetTimeoutError:
                _, late = ray.wait(references, num_returns=len(references), timeout=0)
                raise TimeoutError(
                    f"fetching the outputs of groups took more than {self._deadline_s:g} s "
                    f"(partial_rollout.deadlines.interrupt_s); awaited: {_named(chunk, late)}"
                ) from None
            except ObjectLostError as error:
                lost = [reference for reference in references if reference.hex() == error.object_ref_hex]
                raise RolloutFailedError(
                    f"outputs of groups are lost: {_named(chunk, lost)}; resume from the last checkpoint "
                    f"(trainer.resume_mode=auto): {one_line(error)}"
                ) from error
            fetched.update(zip(chunk, outputs, strict=True))
        return fetched


def _named(chunk: Mapping[str, Any], references: Iterable[Any], limit: int = 8) -> str:
    """Uids of the groups whose outputs are in ``references``, or else of the whole chunk; at most ``limit``."""
    among = set(references) or set(chunk.values())
    uids = [uid for uid, reference in chunk.items() if reference in among]
    more = f" and {len(uids) - limit} more" if len(uids) > limit else ""
    return f"{', '.join(uids[:limit])}{more}"
