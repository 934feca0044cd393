"""The keys of ``partial_rollout``: their choices, the checked settings, and a user's mistakes in one line."""
