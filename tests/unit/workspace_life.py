"""A worker's life for ``test_workspace``: scripted conversations against the workspace tool, until it ends or is killed.

``python -m tests.unit.workspace_life ROOT JOURNAL CONVERSATIONS CALLS``. JOURNAL stands for the manager: a line for each
tool result that it has been told, which a new life goes on from.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.tool_journal import journaled
from tests.chaos.workspace import Workspace

COMMAND = "echo {n} >> log; sleep 0.01; wc -l < log; cp log copy"


class Manager:
    """Its half that a sample sees; what it is told survives a kill."""

    def __init__(self, journal):
        self.known = {}
        if journal.exists():
            lines = journal.read_text().splitlines(keepends=True)
            # A line that the kill cut off was never confirmed.
            for line in (line for line in lines if line.endswith("\n")):
                sample, result = json.loads(line)
                self.known.setdefault(sample, {})[result["call"]] = result
            journal.write_text("".join(line for line in lines if line.endswith("\n")))
        self.file = journal.open("a")

    @property
    def outbox(self):
        return self

    @contextlib.asynccontextmanager
    async def engine_call(self, sample):
        yield

    def leave(self, sample):
        pass

    def report_now(self, sample):
        for result in sample.take_unsent()[1]:
            self.file.write(json.dumps([sample.id, result]) + "\n")
        self.file.flush()

    async def tell(self, sample):
        self.report_now(sample)


async def converse(tool, manager, name, calls):
    LIVE_SAMPLE.set(LiveSample(name, manager, priority=0, restored_tools=dict(manager.known.get(name, {}))))
    for n in range(calls):
        instance, _ = await tool.create(create_kwargs={})
        response, _, _ = await tool.execute(instance, {"command": COMMAND.format(n=n)}, agent_data=None)
        assert response.text.strip() == str(n + 1), f"{name}, call {n}: {response.text}"
        await tool.release(instance)


async def main(root, journal, conversations, calls):
    manager = Manager(journal)
    (tool,) = journaled([Workspace({"root": root}, None)])
    # Named as the samples of a run.
    await asyncio.gather(*[converse(tool, manager, f"0/{i}#0", calls) for i in range(conversations)])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
