"""The scale benchmark drives the real manager actor and workers through whole rounds."""

import json

from tests.bench.__main__ import main as bench


def test_rounds_of_two_replicas_train_whole_batches(tmp_path):
    path = tmp_path / "scale.json"
    sizes = ["--replicas", "2", "--samples-per-replica", "16", "--rounds", "1", "--lognormal", "150", "200", "1000"]
    bench(["scale", *sizes, "--json", str(path)])
    (row,) = json.loads(path.read_text())
    # Speeds are for the benchmark, not for a test, to judge.
    assert row["replicas"] == 2 and row["samples"] == 32 and row["trained_samples"] == 2 * 16
    assert row["interrupt_s"] > 0 and 0 < row["overhead"] < 1
    assert 0 < row["open_lost_s"] <= row["open_s"] and row["prepare_s"] > 0
    assert row["manager_cpu_s"] > 0 and row["manager_rss_mb"] > 50
