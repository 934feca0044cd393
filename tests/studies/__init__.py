"""Studies: named arms trained over seeds, and one report of all of them.

``python -m tests.studies NAME`` runs the runs that are missing, so it continues where it stopped, and
writes a table and a picture. ``named.py`` lists the studies; each is a folder with its arms and its columns.
"""
