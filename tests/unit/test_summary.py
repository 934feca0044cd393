"""The row of docs/compat.md says what pytest's files say."""

import runpy
from pathlib import Path

SUMMARY = runpy.run_path(str(Path(__file__).resolve().parents[1] / "summary.py"))
CASES = """<testsuites><testsuite name="pytest">
<testcase classname="tests.e2e.test_a" name="test_one"/>
<testcase classname="tests.e2e.test_a" name="test_two"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.e2e.test_a" name="test_three"><skipped type="pytest.xfail" message="upstream"/></testcase>
<testcase classname="tests.e2e.test_a" name="test_four"><skipped type="pytest.skip" message="no index"/></testcase>
</testsuite></testsuites>"""


def test_row_counts_outcomes_and_says_what_did_not_pass(tmp_path):
    (tmp_path / "e2e.xml").write_text(CASES)
    paths = [tmp_path / "unit.xml", tmp_path / "e2e.xml"]
    assert SUMMARY["summary"](paths, "abc", {"torch": "2.11.0"}, "2026-01-02").splitlines() == [
        "| commit | date | torch | unit | e2e |",
        "| --- | --- | --- | --- | --- |",
        "| abc | 2026-01-02 | 2.11.0 | did not end | 1 passed, 1 failed, 1 xfailed, 1 skipped |",
        "",
        "- unit did not end",
        "- failed: e2e test_a::test_two: assert 1 == 2",
        "- xfailed: e2e test_a::test_three: upstream",
        "- skipped: e2e test_a::test_four: no index",
    ]
