"""The replicas' addresses, kept alike in the agent-loop workers, verl's load balancer and the trace."""

from __future__ import annotations

import logging
from typing import Any

from ray.exceptions import RayActorError

from recipe.partial_rollout.records.run_trace import RunTrace
from recipe.partial_rollout.rollout.server_control import ServerControl
from recipe.partial_rollout.rollout.worker_pool import WorkerPool
from recipe.partial_rollout.waits import answer_of, one_line, result_of, within
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice

logger = logging.getLogger(__name__)


class ReplicaRoster:
    """Announces restarted replicas under their new addresses.

    Args:
        control: restarts them.
        balancer: handle of verl's load balancer, which serves validation.
        trace: of the run.
        workers: number of agent-loop workers.
        deadline_s: seconds for an answer of the load balancer.
    """

    def __init__(
        self, control: ServerControl, balancer: Any, trace: RunTrace, workers: int, deadline_s: float = 60.0
    ) -> None:
        self._control = control
        self._balancer = balancer
        self._trace = trace
        self._workers = workers
        self._deadline_s = deadline_s
        self._addresses = control.addresses
        self._known_restarts = 0

    def choice_of(self, worker: int) -> ReplicaChoice:
        """A choice among the living replicas, for worker number ``worker``."""
        return ReplicaChoice(self._control.servers, place=worker / self._workers)

    async def meet_new(self, pool: WorkerPool) -> None:
        """Announce the replicas that were restarted since this was last called."""
        control = self._control
        if control.restarted == self._known_restarts:
            return
        self._known_restarts = control.restarted
        gone = [address for address in self._addresses if address not in control.servers]
        new = {address: server for address, server in control.servers.items() if address not in self._addresses}
        try:
            await self._tell_balancer("remove_servers", gone)
            await self._tell_balancer("add_servers", new)
        except RayActorError as error:
            # Ray may have placed it on a node that has died.
            logger.warning("verl's load balancer is dead, and the workers do without it: %s", one_line(error))
        await pool.ask_each("use_replicas", self.choice_of)
        self._addresses = control.addresses
        self._trace.use_replicas(control.addresses)

    async def _tell_balancer(self, verb: str, servers: Any) -> None:
        telling = answer_of(lambda: result_of(getattr(self._balancer, verb).remote(servers)))
        await within(telling, self._deadline_s, f"telling verl's load balancer to {verb}", "interrupt_s")
