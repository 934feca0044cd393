"""``check``: this machine, and what a run on it would be and lacks."""
