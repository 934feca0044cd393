"""Forecasts of rounds before they run: the real ``PromptsManager`` against a model of the engine."""
