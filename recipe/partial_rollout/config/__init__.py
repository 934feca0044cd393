"""The keys of ``partial_rollout``: their choices, the checked settings, and one-line errors for users' mistakes."""
