"""Waits end in time and whole, and errors in one line name what failed."""

import asyncio
import gc

import pytest
from omegaconf.errors import ConfigKeyError
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from recipe.partial_rollout.waits import NoAnswerError, is_out_of_reach, one_line, wait

REASON = "The actor is dead because its worker process has died."
DEAD = f"""The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tactor_id: 20dbc4c33fb324cfbb62e23901000000
\tpid: 3600
\tname: G6WQxZWorkerDict_0:0
{REASON}"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\n\n  last  \n"), "ValueError: last"),
        (RayActorError(error_msg=DEAD, actor_id="20db"), f"RayActorError: WorkerDict (pid 3600): {REASON}"),
        (
            ConfigKeyError("Key 'a' is not in struct\n    full_key: a\n    object_type=dict"),
            "ConfigKeyError: Key 'a' is not in struct",
        ),
        # What only quotes a dead actor is not it.
        (ValueError(DEAD), f"ValueError: {REASON}"),
    ],
)
def test_one_line_names_the_type_the_reason_and_the_actor_that_died(error, line):
    assert one_line(error) == line


def test_actor_whose_own_question_failed_is_not_out_of_reach_itself():
    inner = RayTaskError("report", "traceback", ActorUnavailableError("connection reset", None)).as_instanceof_cause()
    assert is_out_of_reach(ActorUnavailableError("connection reset", None)) and not is_out_of_reach(inner)


async def fails(error, after_s=0.0):
    await asyncio.sleep(after_s)
    raise error


LATE = NoAnswerError("saving took more than 0.05 s .*stall_s")


@pytest.mark.parametrize(
    ("awaited", "watch", "ends"),
    [
        (lambda: asyncio.sleep(0, 7), lambda: fails(ValueError("late"), 0.01), 7),
        # Both at once.
        (lambda: asyncio.sleep(0, 7), lambda: fails(ValueError("watch")), 7),
        (lambda: fails(KeyError("main")), lambda: fails(ValueError("watch")), KeyError("main")),
        (lambda: asyncio.sleep(9), lambda: fails(ValueError("watch")), ValueError("watch")),
        (lambda: asyncio.sleep(9), lambda: asyncio.sleep(9), LATE),
    ],
)
async def test_wait_ends_with_the_first_of_answer_watch_and_deadline_and_wholly(awaited, watch, ends):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
    before = asyncio.all_tasks()
    waiting = wait(awaited(), 0.05, "saving", "stall_s", watches=[watch()])
    if isinstance(ends, Exception):
        with pytest.raises(type(ends), match=str(ends)):
            await waiting
    else:
        assert await waiting == ends
    await asyncio.sleep(0)
    gc.collect()
    assert asyncio.all_tasks() == before and told == [], "asyncio prints what nobody retrieves"
