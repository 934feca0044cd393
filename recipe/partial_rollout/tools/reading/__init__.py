"""Reads back what a run has written (``records/``): trainings only write."""
