"""The trainers around verl's ``fit``, and their parts: batch, loss, weight transfer, rewards, the log of each step."""
