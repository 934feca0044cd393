"""Full garbage collections wait for the end of a round.

In one, Python looks at every object that a process has. Where 50,000 samples live, that took 1 to 3 s in which no report
was heard and no slot filled, at moments that nobody chose (``bench scale`` at 1,024 replicas). While the trainer updates,
nobody waits for it.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
_NEVER = 2**31 - 1


def hold() -> None:
    """A round begins: no full collection by itself; one that is asked for, as Ray does, passes over what lives now."""
    gc.freeze()
    gc.set_threshold(*_USUAL[:2], _NEVER)


def release() -> None:
    """The round is over: Python collects again when it finds it worthwhile."""
    gc.unfreeze()
    gc.set_threshold(*_USUAL)
