"""The driver's half of a round: agent-loop manager, worker pool, replicas, weight sync, batch, metrics."""
