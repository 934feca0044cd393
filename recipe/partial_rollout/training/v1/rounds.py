"""A replay buffer for verl's v1 trainer that gets whole batches from the recipe's agent-loop manager.

verl's v1 puts samples into TransferQueue one by one, and polls until there are enough, without a deadline. Here the
recipe's manager makes a batch as it does for ``RayPPOTrainer``, with the same deadlines and checks. Then
``RoundBuffer`` puts the whole batch into TransferQueue, one row without padding for each output of an agent loop::

    v1 asks for a batch -> manager.generate_sequences (Driver.next_batch) -> TransferQueue -> v1's passes and update

TransferQueue holds the batch that trains, and nothing else. Samples in flight are held by the manager actor, and saved
in its snapshot.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from recipe.partial_rollout.training.agent_loop_manager import samples_of
from recipe.partial_rollout.worker.loop_rows import ROW

_PARTITION = "train"
"""v1's, of TransferQueue"""
_OF_RESPONSE = ("response_mask", "rollout_log_probs", "rollout_versions", "rm_scores")
"""tensors [B, R] whose part is copied into a row, if the batch has them"""
_MADE_OF = {"prompts", "responses", "attention_mask", "input_ids", "position_ids", *_OF_RESPONSE}
"""tensors that a batch may have; ``rows_of`` refuses a batch with any other, because its rows would lack it"""
_COLUMNS = ("uid", "data_source", "reward_model", "multi_modal_inputs")
"""columns that v1 reads as fields of their own"""


class DataEndedError(Exception):
    """The data has ended before the last step: v1's ``fit`` has no other way out of its loop."""


class RoundBuffer:
    """Stands in for v1's replay buffer.

    Args:
        rollout: the agent-loop manager, which makes the batches.
        loader: yields the rows of a batch; under PR placeholders (``SlotLoader``), because the manager has the prompts.
        samples: number of samples of a prompt, ``rollout.n``.
    """

    def __init__(self, rollout: Any, loader: Any, samples: int) -> None:
        self._rollout, self._loader, self._samples = rollout, loader, samples
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._batch: DataProto
        """the batch that was put last"""

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Make the batch of step ``global_steps``, and return it with its metrics.

        Raises:
            DataEndedError: the data has ended.
        """
        prompts = DataProto.from_single_dict(self._next_rows())
        prompts.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(prompts))], dtype=object)
        prompts.meta_info["global_steps"] = global_steps
        prompts = prompts.repeat(self._samples, interleave=True)
        output = self._rollout.generate_sequences(prompts)
        timings = output.meta_info.pop("timing", {})
        samples = samples_of(output)
        columns = {key: column[samples] for key, column in prompts.non_tensor_batch.items()}
        columns |= {ROW: np.zeros(len(output), int), **output.non_tensor_batch}
        self._batch = DataProto(output.batch, columns, {"global_steps": global_steps})
        return self._put(), {f"timing_s/{key}": value for key, value in timings.items()}

    def score(self, scored: Callable[[DataProto], DataProto]) -> None:
        """Put the batch again, with the scores of a colocated reward model."""
        self._batch = self._batch.union(scored(self._batch))
        self._put()

    def _next_rows(self) -> dict[str, Any]:
        """Return the loader's next rows, of this epoch or the following."""
        rows = next(self._rows, None)
        if rows is None:
            self._rows = iter(self._loader)
            rows = next(self._rows, None)
        if rows is None:
            raise DataEndedError
        return rows

    def _put(self) -> KVBatchMeta:
        """Put the present batch into TransferQueue, and return its keys and tags."""
        rows = rows_of(self._batch)
        # v1's names: uid, sample of the prompt, row of the sample.
        samples, numbers = samples_of(self._batch), self._batch.non_tensor_batch[ROW]
        keys = [
            f"{row['uid']}_{sample % self._samples}_{number}"
            for row, sample, number in zip(rows, samples, numbers, strict=True)
        ]
        tags = [_tag(row, self._batch.meta_info["global_steps"]) for row in rows]
        tq.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=list_of_dict_to_tensordict(rows), tags=tags)
        return KVBatchMeta(partition_id=_PARTITION, keys=keys, tags=tags)


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """Return the rows of ``batch`` (``assemble_batch``) as v1 has them in TransferQueue: without padding.

    ``extra_fields`` has the columns that v1 does not read by name. An empty response becomes one padding token outside
    the loss, because verl's nested tensors cannot have an empty row.

    Raises:
        ValueError: the batch has a tensor that would be lost.
    """
    if unknown := sorted(set(batch.batch.keys()) - _MADE_OF):
        names = ", ".join(unknown)
        raise ValueError(f"a batch would lose its tensors {names} under trainer.use_v1=True; set trainer.use_v1=False")
    width = batch.batch["prompts"].shape[1]
    sizes = batch.batch["attention_mask"][:, :width].sum(1).tolist()
    lengths = batch.batch["attention_mask"][:, width:].sum(1).clamp(min=1).tolist()
    columns, rows = batch.non_tensor_batch, []
    for i, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        values = {key: column[i] for key, column in columns.items() if key != ROW}
        prompt, response = batch.batch["prompts"][i, width - size :], batch.batch["responses"][i, :length]
        row = {key: batch.batch[key][i, :length] for key in _OF_RESPONSE if key in batch.batch.keys()}  # noqa: SIM118
        row |= {"prompts": prompt, "responses": response, "loss_mask": row["response_mask"]}
        positions = torch.arange(size + length)
        if batch.batch["position_ids"].dim() > 2:
            # Of a vision model: [4, size + length].
            positions = batch.batch["position_ids"][i, :, width - size : width + length]
        row |= {"input_ids": torch.cat([prompt, response]), "position_ids": positions}
        row |= {"multi_modal_inputs": {}, **{key: values.pop(key) for key in _COLUMNS if key in values}}
        row |= {"num_turns": int(values.pop("__num_turns__")), "extra_fields": values}
        rows.append(row)
    return rows


def _tag(row: dict[str, Any], step: int) -> dict[str, Any]:
    """Make the tag of a row of step ``step``, which v1's balance and metrics read."""
    versions = row.get("rollout_versions", torch.empty(0))
    versions = versions[versions >= 0]
    prompt, response = len(row["prompts"]), len(row["responses"])
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": step,
        "min_global_steps": int(versions.min()) if len(versions) else step - 1,
        "max_global_steps": int(versions.max()) if len(versions) else step - 1,
    }


def give_versions(batch: KVBatchMeta) -> None:
    """Set ``rollout_versions`` of verl's filler rows in ``batch`` to a single -1: no policy sampled their one token.

    verl makes a filler row from a copy of another row. It replaces the tokens, but keeps the versions of that row.
    """
    fillers = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")]
    if fillers:
        rows = [{"rollout_versions": torch.full((1,), -1, dtype=torch.int32)} for _ in fillers]
        tq.kv_batch_put(keys=fillers, partition_id=_PARTITION, fields=list_of_dict_to_tensordict(rows))
