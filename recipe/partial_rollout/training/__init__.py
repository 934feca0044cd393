"""The driver around verl's ``fit``: trainer, loss, correction, what a step prints."""
