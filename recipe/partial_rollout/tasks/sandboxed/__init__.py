"""A reward that checks each response in a process of its own, under limits: for code, proofs, and whatever takes long."""
