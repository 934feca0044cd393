"""Forecasts of rounds before they run: the real ``PromptsManager`` against a model of the engine.

``engine_curve`` models how fast an engine decodes, ``lengths`` what it decodes; ``simulation`` plays rounds, and
``forecast`` summarizes them. ``tools plan`` prints forecasts, and ``overlap_control`` decides by them.
"""
