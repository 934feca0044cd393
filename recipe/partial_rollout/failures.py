"""How the recipe speaks of errors."""

from __future__ import annotations

from ray.exceptions import RayActorError


def one_line(error: BaseException | None) -> str:
    """Type and last line of ``error``: Ray puts a remote traceback before the message that matters."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else '(no message)'}"


class ReplicaError(RuntimeError):
    """A vLLM replica did not answer a request.

    Args:
        dead: the replica will not answer any other request either.
    """

    def __init__(self, message: str, *, dead: bool) -> None:
        super().__init__(message)
        self.dead = dead


def means_death(error: BaseException) -> bool:
    """Whether ``error`` says that a replica's process or its engine has died."""
    return isinstance(error, RayActorError) or "EngineDead" in f"{type(error).__name__} {error}"
