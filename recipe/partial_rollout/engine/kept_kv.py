"""``partial_rollout.resume_kv``: what becomes of an interrupted sample's KV blocks while the weights change.

vLLM's prefix cache holds the blocks of an aborted request until their room is needed. Where a weight sync does not empty
it, a resumed request finds its own blocks there and decodes on after reading at most one block of tokens again. Blocks
of older weights must not reach anyone else, so every request of a kept engine carries a salt, which vLLM hashes into its
blocks. A training sample's salt is its group and the version of the sample's first token:

* siblings that start under the same weights read their prompt once;
* a resumed sample finds its own blocks, and its siblings', under whatever weights it goes on;
* a sibling that starts later has another salt: all it samples from is of the weights that its tokens are filed under.

Everything else (validation) has the policy version for its salt. Without ``keep`` there are no salts: the cache is
emptied at each interruption and each weight sync.

The tokens that follow are sampled from mixed policies: new weights over keys and values of old ones. Their behaviour
log-probs are the engine's own, so the decoupled loss stays correct; ``kv_gap`` measures the difference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

_MARK = "@"


def request_id_of(group: str, first_version: int | None) -> str:
    """A new vLLM request id for an engine call of a sample of ``group``.

    Args:
        first_version: the weights that made the sample's first token; None before there is one, or if that is unknown.
    """
    return f"{group}{_MARK}{'' if first_version is None else first_version}{_MARK}{uuid4().hex}"


def salt_of(request_id: str, version: int | None) -> str:
    """Whose blocks the request may find; ``version`` is the weights' that the engine holds."""
    group, mark, call = request_id.partition(_MARK)
    if not mark:
        return f"version {version}"
    return f"group {group} begun {call.partition(_MARK)[0] or version}"


class SaltedEngine:
    """vLLM's ``AsyncLLM`` whose requests find only blocks that ``salt_of`` allows; everything else is the engine's own.

    Args:
        engine: the ``AsyncLLM``. version: the policy version that it holds.
    """

    def __init__(self, engine: Any, version: Callable[[], int | None]) -> None:
        self._engine = engine
        self._version = version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *, prompt: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """``AsyncLLM.generate`` of a tokens prompt."""
        salted = {**prompt, "cache_salt": salt_of(request_id, self._version())}
        return self._engine.generate(prompt=salted, request_id=request_id, **options)


def kv_gap(batch: TensorDict, proximal: torch.Tensor, version: int) -> dict[str, float]:
    """Difference that resumption makes to the log-probs of the newest tokens (nats, mean and maximum; their number).

    Over the tokens that weights ``version``, those of ``proximal`` [B, R], sampled in samples begun by older weights:
    engine and trainer hold the same weights there, so what differs is the KV before them, and float rounding.

    Args:
        batch: with ``rollout_versions`` and ``rollout_log_probs`` [B, R]; -1 marks what was not sampled.
    """
    versions = batch["rollout_versions"]
    older = ((versions >= 0) & (versions < version)).any(dim=1, keepdim=True)
    newest = (versions == version) & older
    gaps = (batch["rollout_log_probs"] - proximal)[newest].abs()
    if not len(gaps):
        return {"mismatch/kv_gap_tokens": 0}
    return {
        "mismatch/kv_gap_tokens": len(gaps),
        "mismatch/kv_gap_mean": float(gaps.mean()),
        "mismatch/kv_gap_max": float(gaps.max()),
    }
