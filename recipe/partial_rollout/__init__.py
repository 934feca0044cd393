"""Partial rollout for verl: long-tailed generations no longer stall synchronous RL."""
