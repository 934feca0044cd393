"""Checks of a run before Ray starts: settings, files, prompts; and the plan that ``--check`` prints."""
