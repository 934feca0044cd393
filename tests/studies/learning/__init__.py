"""Compare what arms learn, at each learning rate, from several warm starts: held-out reward of equal training."""
