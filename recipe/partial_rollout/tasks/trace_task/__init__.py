"""Real lengths without real weights: each prompt carries a response budget from a long-tailed trace.

A random-weight model never ends a response meaningfully; with the end token ignored and the budget drawn from a trace, the
engine decodes exactly the lengths that a trained model would, which is what a rollout benchmark needs.
"""
