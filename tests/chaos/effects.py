"""What the conversations of a run have done to their workspaces, against a run that nothing disturbed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

TRANSCRIPTS = "transcripts"


@dataclass(frozen=True, slots=True)
class Conversation:
    """By what two runs can be compared."""

    effects: int
    """lines of its log, one for each command of the attempt that ended"""
    workspace: str
    """hash of that attempt's files, names and contents"""
    transcript: str
    """checksum of its tokens, the tools' answers among them"""


def conversations(orders: Path) -> dict[str, Conversation]:
    """By sample: all that ended in the run whose loops had ``orders``."""
    found = {}
    for transcript in sorted((orders / TRANSCRIPTS).iterdir()):
        attempt, checksum = transcript.read_text().split()
        contents = [(path.name, path.read_bytes()) for path in sorted((orders / "workspaces" / attempt).glob("*"))]
        lines = sum(content.count(b"\n") for _, content in contents)
        name = hashlib.sha256(repr(contents).encode()).hexdigest()
        found[transcript.name] = Conversation(lines, name, checksum)
    return found


def commands(orders: Path) -> int:
    """Commands that training samples ran, those of attempts included that a crash ended."""
    logs = (orders / "workspaces").glob("[0-9]*/*/log")
    return sum(log.read_bytes().count(b"\n") for log in logs)


def differences(found: dict[str, Conversation], undisturbed: dict[str, Conversation]) -> list[str]:
    """What was lost, doubled, or came out otherwise; a line for each conversation."""
    lines = []
    for name in sorted(found.keys() | undisturbed.keys()):
        here, there = found.get(name), undisturbed.get(name)
        if here != there:
            lines.append(f"conversation {name}: {here}, and {there} where nothing disturbed it")
    return lines
