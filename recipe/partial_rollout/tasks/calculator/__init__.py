"""Clock-10 with a calculator: the embedded task of conversations, for the tools quick start and its tests.

The problems, data, reward and model are clock10's. Here the model guesses operators and calls a tool for the value, in the
Hermes format, until the value is 0. So the number of turns has a long tail of its own.
"""
