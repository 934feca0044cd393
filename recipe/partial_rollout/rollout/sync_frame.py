"""What PR does before and after new weights go to the replicas.

==========  ===============================================  ======================================================
placement   before                                           after
==========  ===============================================  ======================================================
colocated   dead replicas are restarted; the others are      the replicas accept requests; training samples wait in
            quiet since the interruption of the round        their workers for the next round
separate    the next prompts are read, dead replicas are     the manager begins the version, and the engines go on
            restarted, and the engines are held
==========  ===============================================  ======================================================
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from recipe.partial_rollout.rollout.server_control import ServerControl

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.stream import Stream


class SyncFrame(Protocol):
    """Around a weight sync, and around verl's putting the replicas to sleep."""

    def staged(self, version: int, start: float, end: float) -> None:
        """The trainer has packed ``version``, and the engines have decoded meanwhile; moments in unix seconds."""
        ...

    async def before(self, version: int) -> None:
        """Afterwards every replica is alive and decodes nothing."""
        ...

    async def after(self, version: int) -> None:
        """Every replica holds ``version``."""
        ...

    async def sleep(self) -> None:
        """verl has a batch and wants the replicas' device memory."""
        ...

    async def wake_up(self) -> None:
        """verl wants the replicas to have their memory."""
        ...


class QuietReplicas:
    """Colocated: nothing decodes during a sync.

    Args:
        control: of the replicas.
    """

    def __init__(self, control: ServerControl) -> None:
        self._control = control

    def staged(self, version: int, start: float, end: float) -> None:
        """See ``SyncFrame``."""

    async def before(self, version: int) -> None:
        """See ``SyncFrame``."""
        await self._control.restart_dead()

    async def after(self, version: int) -> None:
        """See ``SyncFrame``."""
        await self._control.resume()

    async def sleep(self) -> None:
        """See ``SyncFrame``."""
        await self._control.sleep()

    async def wake_up(self) -> None:
        """See ``SyncFrame``."""
        await self._control.wake_up()


class HeldReplicas:
    """Separate: engines decode until the weights are loaded, and go on with the same samples.

    Args:
        control: of the replicas.
        stream: begins the versions, and is told of each hold.
    """

    def __init__(self, control: ServerControl, stream: Stream) -> None:
        self._control = control
        self._stream = stream
        self._held_at = 0.0

    def staged(self, version: int, start: float, end: float) -> None:
        """See ``SyncFrame``."""
        self._stream.note_phase("stage", version, start, end)

    async def before(self, version: int) -> None:
        """See ``SyncFrame``."""
        await self._stream.prepare_version(version)
        await self._control.restart_dead()
        self._held_at = time.time()
        await self._control.hold()
        # A replica that died since is restarted while the others are held: it cannot miss a version.
        await self._control.restart_dead()

    async def after(self, version: int) -> None:
        """See ``SyncFrame``."""
        await self._stream.next_version(version)
        await self._control.resume()
        self._stream.note_phase("hold", version, self._held_at, time.time())

    async def sleep(self) -> None:
        """The engines have devices of their own and decode on."""

    async def wake_up(self) -> None:
        """They never sleep."""
