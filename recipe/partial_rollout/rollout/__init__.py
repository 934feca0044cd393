"""The driver's side of a run: prompt source, driver, worker guard, replicas, recorder, run files, stop signals."""
