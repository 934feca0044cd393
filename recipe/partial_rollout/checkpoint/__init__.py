"""Checkpoints that are whole or refused: snapshot, manifest, durable files."""
