"""A round from preparation to its end; ``Rounds`` owns it and changes its state.

::

    PREPARED --open--> OPEN --interrupt--> INTERRUPTED --flush--> FLUSHING --finish--> FINISHED
"""

from __future__ import annotations

from enum import StrEnum

from recipe.partial_rollout.rollout.played_round import PlayedRound


class RoundState(StrEnum):
    """The state of a round."""

    PREPARED = "prepared"
    """the manager grants its samples once the previous round is flushed; engine calls are not allowed yet"""
    OPEN = "open"
    """workers may call the engines"""
    INTERRUPTED = "interrupted"
    """no engine runs any more; the batch is on its way to the trainer"""
    FLUSHING = "flushing"
    """the trainer updates on the batch while the workers report what the round left unfinished"""
    FINISHED = "finished"
    """the manager knows everything, and that the batch is trained"""


class LiveRound:
    """The rollout phase of ``step``.

    >>> opened = LiveRound(3)
    >>> opened.open()
    >>> opened.require_finished("a checkpoint")
    Traceback (most recent call last):
    RuntimeError: the round of step 3 is open, not finished: it is too early for a checkpoint
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._state = RoundState.PREPARED
        self._played: PlayedRound | None = None

    @property
    def state(self) -> RoundState:
        return self._state

    def open(self) -> None:
        """Workers may call the engines from here on."""
        self._move(RoundState.PREPARED, RoundState.OPEN)

    def interrupt(self) -> None:
        """Note that the engines are being stopped."""
        self._move(RoundState.OPEN, RoundState.INTERRUPTED)

    def flush(self, played: PlayedRound | None) -> None:
        """The workers are asked for their last reports; ``played`` is the played round, None if it was given up."""
        self._move(RoundState.INTERRUPTED, RoundState.FLUSHING)
        self._played = played

    def finish(self) -> None:
        """Note that everything is reported and the batch, if any, is trained."""
        self._move(RoundState.FLUSHING, RoundState.FINISHED)

    def played(self) -> PlayedRound:
        """The played round; only while it is flushing.

        Raises:
            RuntimeError: it is in another state, which the message names.
        """
        if self._state is not RoundState.FLUSHING or self._played is None:
            raise RuntimeError(f"the round of step {self.step} is {self._state}: there is nothing to finish")
        return self._played

    def require_finished(self, what: str) -> None:
        """Raise RuntimeError, which names the state, if the round is not finished and ``what`` comes too early."""
        if self._state is not RoundState.FINISHED:
            raise RuntimeError(
                f"the round of step {self.step} is {self._state}, not finished: it is too early for {what}"
            )

    def _move(self, before: RoundState, after: RoundState) -> None:
        if self._state is not before:
            raise RuntimeError(f"the round of step {self.step} is {self._state}, not {before}: it cannot be {after}")
        self._state = after
