"""``partial_rollout.resume_kv``: what happens to an interrupted sample's KV blocks while the weights change.

vLLM's prefix cache holds the blocks of an aborted request until it needs their room. If a weight sync does not empty the
cache, a resumed request finds its own blocks there and prefills at most one block of tokens again. Other requests must
not find blocks of older weights, so with ``keep`` every request carries a salt, which vLLM hashes into its blocks. A
training sample's salt is its group and the version of the sample's first token:

* siblings that start under the same weights prefill their prompt once;
* a resumed sample finds its own blocks, and its siblings', whatever the present weights;
* a sibling that starts later has another salt, so it finds no blocks of older weights.

Everything else (validation) has the policy version as its salt. Without ``keep`` there are no salts: the cache is
emptied at each interruption and each weight sync.

The tokens after a resumption are sampled from mixed policies: new weights over keys and values of old ones. Their
behaviour log-probs are the engine's own, so the decoupled loss stays correct; ``kv_gap_mean`` measures the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    import torch

_MARK = "@"


def request_id_of(group: str, first_version: int | None) -> str:
    """A new vLLM request id for an engine call of a sample of ``group``.

    Args:
        first_version: version of the weights that made the sample's first token; None if there is none, or if unknown.
    """
    return f"{group}{_MARK}{'' if first_version is None else first_version}{_MARK}{uuid4().hex}"


def salt_of(request_id: str, version: int | None) -> str:
    """The salt of a request, which decides whose blocks it may find; ``version`` is that of the engine's weights."""
    group, mark, call = request_id.partition(_MARK)
    if not mark:
        return f"version {version}"
    return f"group {group} begun {call.partition(_MARK)[0] or version}"


def newest_of_older(versions: torch.Tensor, version: int) -> torch.Tensor:
    """[B, R] bool, tokens that the weights ``version`` sampled in samples begun by older weights.

    Args:
        versions: [B, R], of each token; below 0 where none was sampled.
    """
    older = ((versions >= 0) & (versions < version)).any(dim=1, keepdim=True)
    return (versions == version) & older
