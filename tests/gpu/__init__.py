"""Experiments that each need seven minutes of one GPU of 80 GB: ``python -m tests.gpu``; CONTRIBUTING.md has the order."""
