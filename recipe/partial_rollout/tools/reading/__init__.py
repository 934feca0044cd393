"""Readers of the files that a run writes with ``records/``. Training code writes them and never reads them here."""
