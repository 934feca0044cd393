"""The tool ``check``, for this machine, and ``--check``, for a run: its plan, and what it lacks."""
