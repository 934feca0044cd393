"""Checks of a run before Ray starts: settings, placement, inputs, rows of the data."""
