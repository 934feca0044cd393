"""Simulate rounds before a run: the real ``PromptsManager``, and a model of the engine in place of vLLM."""
