"""Orders that a user might name in ``partial_rollout.scheduling.policy``, the good, the odd and the broken."""

import random

from recipe.partial_rollout.manager.scheduling import QueuedGroup


def longest_prompt(group: QueuedGroup):
    """Reads the row alone, so prompts do not start in the order of the data."""
    return (-(group.row["index"] * 7 % 5),)


def most_tokens(group: QueuedGroup):
    """Reads a number that grows while the group is queued."""
    return (-group.tokens,)


def newest_first(group: QueuedGroup):
    return -group.order


def youngest_weights(group: QueuedGroup):
    """New prompts before all others, the oldest last."""
    return (0, 0) if group.birth is None else (1, -group.birth)


def drawn(group: QueuedGroup):
    """No function of the group at all."""
    return (random.random(), random.random())


def of_changing_length(group: QueuedGroup):
    return (group.unfinished,) * random.randint(0, 2)


SOUND = (longest_prompt, most_tokens, newest_first, youngest_weights, drawn, of_changing_length)


def raises(group: QueuedGroup):
    return (group.row["difficulty"],)


def raises_later(group: QueuedGroup):
    """Once the group has started."""
    return (1 / (group.birth is None),)


def is_text(group: QueuedGroup):
    return (group.uid,)


def is_nothing(group: QueuedGroup):
    pass


def is_nan(group: QueuedGroup):
    return (float("nan"),)


def writes(group: QueuedGroup):
    group.unfinished = 0
    return (0,)


BROKEN = (raises, raises_later, is_text, is_nothing, is_nan, writes)


def itself(group: QueuedGroup):
    """What an order gets."""
    return group
