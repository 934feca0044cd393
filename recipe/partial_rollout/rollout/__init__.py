"""The driver's half of a round: manager of agent loops, worker pool, replicas, weight sync, batch, metrics."""
