"""Does partial rollout learn what synchronous rollout learns? Held-out reward against trained groups, per arm."""
