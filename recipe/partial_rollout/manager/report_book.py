"""Passes the workers' reports on to the manager: each event once, and none from a worker that was released."""

from __future__ import annotations

import logging
from collections.abc import Callable

from recipe.partial_rollout.manager.failure_policy import FailureVerdict
from recipe.partial_rollout.manager.group_filter import MissingMetricError
from recipe.partial_rollout.manager.messages import Report
from recipe.partial_rollout.manager.output_store import OutputStore
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Progress

logger = logging.getLogger(__name__)


class ReportBook:
    """Books the reports of workers.

    Args:
        store: takes the outputs of finished samples.
        fail: called with the reason why the run must end.
        retry_later: called with a failed sample to retry, and the seconds until then.
    """

    def __init__(
        self,
        manager: PromptsManager,
        store: OutputStore,
        fail: Callable[[str], None],
        retry_later: Callable[[str, float], None],
    ) -> None:
        self._manager = manager
        self._store = store
        self._fail = fail
        self._retry_later = retry_later

    def book(self, report: Report) -> None:
        """Book progress first: it includes the last progress of samples that the other fields name.

        Raises:
            RuntimeError: the worker was released, so other workers have its samples; or a sample does not run there,
                so the report came twice.
        """
        self._manager.incarnation(report.worker)
        for progress in report.progress:
            self._book_progress(progress)
        for sample_id in report.interrupted:
            self._manager.interrupt(sample_id)
        for sample_id in report.away:
            self._manager.leave(sample_id)
        for sample_id in report.back:
            self._manager.come_back(sample_id)
        try:
            for (sample_id, _), output in zip(report.finished, self._store.put(report.finished), strict=True):
                self._manager.finish(sample_id, output)
            for sample_id, error in report.failed:
                self._book_failure(sample_id, report.worker, error)
        except MissingMetricError as error:
            self._fail(str(error))

    def _book_progress(self, progress: Progress) -> None:
        for segment in progress.segments:
            self._manager.add_segment(progress.sample_id, segment)
        for result in progress.tool_results:
            self._manager.add_tool_result(progress.sample_id, result)

    def _book_failure(self, sample_id: str, worker: str, error: str) -> None:
        verdict = self._manager.fail(sample_id, error)
        logger.warning("sample %s on %s failed: %s (verdict: %s)", sample_id, worker, error, verdict)
        if verdict is FailureVerdict.RETRY:
            self._retry_later(sample_id, self._manager.retry_delay_s(sample_id))
        elif verdict is FailureVerdict.RAISE:
            self._fail(f"sample {sample_id} on {worker} failed: {error}")
