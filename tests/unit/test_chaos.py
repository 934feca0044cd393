"""What ``tests.chaos`` compares after a training with faults: an effect that is lost or doubled is seen."""

import pytest

from tests.chaos.effects import conversations, differences


def orders(root, log, said="1"):
    """What one conversation leaves in the run's folder ``root``."""
    files = root / "workspaces" / "live" / "0_3#1" / "files"
    for folder in (files, root / "transcripts"):
        folder.mkdir(parents=True)
    (files / "log").write_text(log)
    (root / "transcripts" / "0_3#1").write_text(said)
    return conversations(root)


@pytest.mark.parametrize(
    ("log", "said"),
    [("a\n", "1"), ("a\nb\nb\n", "1"), ("a\nc\n", "1"), ("a\nb\n", "2")],
    ids=["lost", "doubled", "other", "told"],
)
def test_effect_that_is_lost_or_doubled_is_seen(tmp_path, log, said):
    undisturbed = orders(tmp_path / "undisturbed", "a\nb\n")
    assert undisturbed["0_3#1"].effects == 2
    assert differences(orders(tmp_path / "same", "a\nb\n"), undisturbed) == []
    (line,) = differences(orders(tmp_path / "faults", log, said), undisturbed)
    assert "0_3#1" in line
