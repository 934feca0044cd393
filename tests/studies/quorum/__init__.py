"""Would a group train once enough of it has ended? Forecasts of the rounds, and the bias of the advantages: no engine runs.

``python -m tests.studies.quorum`` writes ``results/quorum.md``, which has the derivations.
"""
