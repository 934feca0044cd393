"""Files of a run, and the records in them: written by the run, read by the tools."""
