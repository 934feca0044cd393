"""Which of Ray's nodes died during a run, for the error that ends it.

A node takes its trainer with it, so that the run ends with the error of whichever call noticed first: a worker, a
replica, a collective. That error names the actor; this says that the machine under it is gone.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

import ray

from recipe.partial_rollout.waits import one_line

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN_S = 3.0


class NodeLostError(RuntimeError):
    """A node of Ray's cluster died, and the run ends with it."""


def accepts(address: str, port: int, within_s: float = _ANSWERS_WITHIN_S) -> bool:
    """Whether something at ``address`` takes a TCP connection."""
    try:
        with socket.create_connection((address, port), within_s):
            return True
    except OSError:
        return False


class ClusterNodes:
    """The nodes of Ray's cluster, but for those whose death the run has outlived."""

    def __init__(self) -> None:
        self._done_with: set[str] = set()

    def outlive(self) -> None:
        """The run goes on without the nodes that are dead now: no later error is due to them."""
        self._done_with |= {node["NodeID"] for node in self._nodes() if not node["Alive"]}

    def _nodes(self) -> list[dict[str, Any]]:
        try:
            return [node for node in ray.nodes() if node["NodeID"] not in self._done_with]
        except Exception as error:
            logger.warning("Ray does not say which of its nodes are alive: %s", one_line(error))
            return []

    def blame(self, error: Exception, remedy: str) -> None:
        """Return if all nodes live, or Ray itself no longer answers.

        Args:
            error: ends the run.
            remedy: what to do about a lost node.

        Raises:
            NodeLostError: names the lost nodes, ``error`` and ``remedy``, in one line.
        """
        if lost := [said for node in self._nodes() if (said := _loss_of(node))]:
            plural = "s" if len(lost) > 1 else ""
            raise NodeLostError(
                f"Ray lost node{plural} {'; '.join(lost)}. The run ends with {one_line(error).rstrip('.')}; {remedy}"
            ) from error


def _loss_of(node: dict[str, Any]) -> str | None:
    """Name, address and reason if ``node`` has died; None if it lives."""
    name, address = node["NodeName"], node["NodeManagerAddress"]
    # Without ``ray start --node-name`` a node's name is its address.
    place = address if name in ("", address) else f"{name} ({address})"
    if not node["Alive"]:
        return f"{place}: {' '.join(node.get('DeathReasonMessage', '').split()) or 'Ray gives no reason'}"
    # A machine that is gone takes no connection, some 15 s before Ray's health checks mark its node dead.
    return None if accepts(address, node["NodeManagerPort"]) else f"{place}: its raylet does not answer"
