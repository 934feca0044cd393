"""A task for rollout benchmarks with random weights: each prompt has a response budget from a long-tailed distribution.

A model with random weights ends its responses at random. Here the engine ignores the end token and decodes exactly the
prompt's budget, so lengths are distributed like those of a trained model.
"""
