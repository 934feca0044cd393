"""What a round will cost before it runs: the real ``PromptsManager`` against a model of the engine.

``engine_curve`` says how fast an engine decodes, ``lengths`` what it decodes, ``simulation`` plays rounds, ``forecast``
sums them up; ``plan`` prints them and ``overlap_control`` steers by them.
"""
