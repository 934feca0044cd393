"""Compare how partial and synchronous rollout learn: held-out reward against trained groups, for each arm."""
