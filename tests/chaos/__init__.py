"""``python -m tests.chaos``: inflict faults on a real training, resume it and audit it."""
