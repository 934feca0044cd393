"""Slots of the engine probe: always granted; an interrupted probe sample ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from recipe.partial_rollout.worker.live_sample import LiveSample


class ProbeEndedError(Exception):
    """The replicas were paused, so a sample of the probe ends."""


class ProbeSlots:
    """The ``SlotKeeper`` of probe samples: a slot is always granted and never given back."""

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        yield

    def release_slot(self, sample: LiveSample) -> None:
        raise ProbeEndedError(sample.id)

    def report_now(self, sample: LiveSample) -> None:
        """Do nothing: nobody needs to know."""

    def leave(self, sample: LiveSample) -> None:
        """Do nothing, as ``report_now``."""

    async def tell(self, sample: LiveSample) -> None:
        """Do nothing, as ``report_now``."""
