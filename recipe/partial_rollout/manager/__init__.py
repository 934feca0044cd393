"""The manager's process: a pure state machine, and the Ray actor around it (``actor``), which does the waiting."""
