"""Full garbage collections are postponed to the end of a round.

A full collection visits every object of the process. With 50,000 samples it took 1 to 3 s, at unpredictable moments, in
which the manager handled no report and filled no slot (``bench scale`` at 1,024 replicas). While the trainer updates,
nobody waits for the manager.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_NEVER = 2**31 - 1


def hold() -> None:
    """A round begins: stop automatic full collections; one that Ray requests skips the objects that exist now."""
    gc.freeze()
    gc.set_threshold(*_USUAL[:2], _NEVER)


def release() -> None:
    """The round is over: Python may run full collections again."""
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
