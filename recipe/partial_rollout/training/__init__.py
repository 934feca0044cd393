"""The driver around verl's ``fit``: trainer, loss, correction, the line printed for each step."""
