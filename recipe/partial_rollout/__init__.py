"""Partial rollout for verl: a few long responses no longer stall synchronous RL."""
