"""The acceptance: ``pytest -m gpu``, a line for each test as it ends."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from tests.gpu.figures import Figures

RUN = "PARTIAL_ROLLOUT_ACCEPT_RUN"
"""environment variable: a finished run of PR to judge, in place of one of the acceptance's own"""


class Reporter:
    """A plugin of pytest: each result is a figure."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str]:
        """Have pytest count the results, and print no letter for them between the figures."""
        return (report.outcome if report.when == "call" or report.outcome != "passed" else "", "", "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report a test's call, and a set-up that failed or skipped it."""
        if report.when == "call" or report.outcome != "passed":
            error = report.longreprtext.splitlines()[-1:] if report.failed else []
            self._figures.emit(
                test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 1), error="".join(error)
            )


def run(options: Namespace, figures: Figures) -> int:
    """Run the tests that are marked ``gpu``; pytest's exit code.

    A tiny acceptance judges the pair's run where there is one, and leaves out the engine's tests: each commit runs these
    with the schedulers of a CPU.
    """
    import pytest

    paired = options.scratch / "runs" / "pair_PR_1"
    if options.tiny and paired.exists():
        os.environ[RUN] = str(paired)
    where = ["tests/gpu"] if options.tiny else ["tests/gpu", "tests/e2e"]
    return int(pytest.main(["-m", "gpu", "-q", "-p", "no:cacheprovider", *where], plugins=[Reporter(figures)]))
