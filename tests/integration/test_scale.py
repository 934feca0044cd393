"""The scale benchmark drives the real manager actor and workers through whole rounds."""

import json

from recipe.partial_rollout.bench.__main__ import main as bench


def test_rounds_of_two_replicas_take_as_long_as_their_engines(tmp_path, capsys):
    path = tmp_path / "scale.json"
    sizes = ["--replicas", "2", "--samples-per-replica", "16", "--rounds", "1", "--lognormal", "150", "200", "1000"]
    assert bench(["scale", *sizes, "--json", str(path)]) in (0, 1), capsys.readouterr().out
    (row,) = json.loads(path.read_text())
    assert row["replicas"] == 2 and row["samples"] == 32
    # A round trains two groups of eight samples or more; a speed is for the benchmark, not for a test, to judge.
    assert row["decoded_tokens"] > 500
    assert row["round_s"] > 0.8 * row["ideal_s"] > 0.1
    assert row["manager_cpu_s"] > 0 and row["manager_rss_mb"] > 50
