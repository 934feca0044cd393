"""The files of a run and the records in them: the run writes them, the tools read them."""
