"""The manager's process: a pure state machine, and the actor that waits for it (``actor``)."""
