"""Errors in one line name what failed."""

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from recipe.partial_rollout.waits import is_out_of_reach, one_line

DEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tactor_id: 20dbc4c33fb324cfbb62e23901000000
\tpid: 3600
\tname: G6WQxZWorkerDict_0:0
The actor is dead because its worker process has died."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\n\n  last  \n"), "ValueError: last"),
        (
            RayActorError(error_msg=DEAD, actor_id="20db"),
            "RayActorError: WorkerDict (pid 3600): The actor is dead because its worker process has died.",
        ),
        # What only quotes a dead actor is not it.
        (ValueError(DEAD), "ValueError: The actor is dead because its worker process has died."),
    ],
)
def test_one_line_names_the_type_the_reason_and_the_actor_that_died(error, line):
    assert one_line(error) == line


def test_actor_whose_own_question_did_not_get_through_is_not_out_of_reach_itself():
    inner = RayTaskError("report", "traceback", ActorUnavailableError("connection reset", None)).as_instanceof_cause()
    assert is_out_of_reach(ActorUnavailableError("connection reset", None)) and not is_out_of_reach(inner)
