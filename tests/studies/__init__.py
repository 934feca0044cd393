"""Named arms trained over seeds, and one report of all of them.

``python -m tests.studies learning`` runs the runs that are missing, so it continues where it stopped, and writes a table
and a picture.
"""
