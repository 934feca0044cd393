"""Whole batches for verl's v1 trainer: its replay buffer and its agent-loop manager in one, over the recipe's own manager.

v1 has samples put into TransferQueue one by one, and polls until there are enough, without a deadline. Here the recipe's
manager makes a batch, training's or validation's, as it does for ``RayPPOTrainer``, under the same guards; then the batch
is put there as a whole, a row a sample, without padding::

    v1 asks for a batch -> manager.generate_sequences (Driver.next_batch) -> TransferQueue -> v1's passes and update

TransferQueue holds the batch that trains, and nothing else: what is in flight is the manager actor's, and in its snapshot.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from recipe.partial_rollout.training.reward_info import objects
from recipe.partial_rollout.worker.rewards import REWARD_INFO

TRAIN, VALIDATION = "train", "val"
"""v1's partitions of TransferQueue"""
_OF_RESPONSE = ("response_mask", "rollout_log_probs", "rollout_versions", "rm_scores")
"""tensors [B, R] that a row has, where the batch has them"""
_MADE_OF = {"prompts", "responses", "attention_mask", "input_ids", "position_ids", *_OF_RESPONSE}
"""tensors of a batch that a row is made of"""
_COLUMNS = ("uid", "data_source", "reward_model", "multi_modal_inputs")
"""columns that v1 reads as fields of their own"""


class DataEndedError(Exception):
    """The data has ended before the last step: v1's ``fit`` has no other way out of its loop."""


class RoundBuffer:
    """Stands in for v1's replay buffer and, in its validation, for the agent-loop manager.

    Args:
        config: of the run.
    """

    def __init__(self, config: DictConfig) -> None:
        rollout = config.actor_rollout_ref.rollout
        self._samples = {TRAIN: rollout.n, VALIDATION: rollout.val_kwargs.n}
        self._workers = rollout.agent.num_workers
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._batch: tuple[DataProto, str, int] | None = None
        """the batch that was put last, its partition and step"""

    def connect(self, rollout: Any, loader: Any) -> None:
        """Take batches from ``rollout``, the arm's agent-loop manager, for what ``loader`` yields; called once."""
        self._rollout, self._loader = rollout, loader

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """The batch of step ``global_steps``, or the validation batch that was just generated; and its metrics.

        Raises:
            DataEndedError: there is none.
            RuntimeError: TransferQueue still holds samples of another.
        """
        if partition_id == VALIDATION:
            return self._put(), {}
        left = (tq.kv_list(TRAIN) or {}).get(TRAIN, {})
        if left:
            raise RuntimeError(
                f"TransferQueue holds {len(left)} samples before step {global_steps}, {next(iter(left))} first"
            )
        prompts = DataProto.from_single_dict(self._next_rows())
        prompts.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(prompts))], dtype=object)
        prompts.meta_info["global_steps"] = global_steps
        self._generate(prompts, TRAIN)
        assert self._batch is not None
        timings = self._batch[0].meta_info.pop("timing", {})
        return self._put(), {f"timing_s/{key}": value for key, value in timings.items()}

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Generate a validation batch, which ``sample`` then returns; one sample after the other gives up alone, if any.

        Raises:
            StopTraining: the user asked for it.
        """
        tq.kv_clear(keys=list(prompts["uid"]), partition_id=VALIDATION)
        # verl makes one array of a column's rows, of lists too.
        stacks = {key: column for key, column in prompts.items() if isinstance(column, NonTensorStack)}
        asked = DataProto.from_tensordict(prompts.exclude(*stacks))
        asked.non_tensor_batch = {key: objects([row.data for row in column]) for key, column in stacks.items()}
        self._generate(asked, VALIDATION)

    def score(self, scored: Callable[[DataProto], DataProto]) -> None:
        """Put the batch again with what a colocated reward model says of it."""
        assert self._batch is not None
        batch, partition, step = self._batch
        self._batch = batch.union(scored(batch)), partition, step
        self._put()

    def _next_rows(self) -> dict[str, Any]:
        """What the loader yields next, in this epoch or the following."""
        rows = next(self._rows, None)
        if rows is None:
            self._rows = iter(self._loader)
            rows = next(self._rows, None)
        if rows is None:
            raise DataEndedError
        return rows

    def _generate(self, prompts: DataProto, partition: str) -> None:
        prompts = prompts.repeat(self._samples[partition], interleave=True)
        if partition == VALIDATION:
            padded, more = pad_dataproto_to_divisor(prompts, self._workers)
            output = unpad_dataproto(self._rollout.generate_sequences(padded), more)
        else:
            output = self._rollout.generate_sequences(prompts)
        columns = {**prompts.non_tensor_batch, **output.non_tensor_batch}
        batch = DataProto(output.batch, columns, output.meta_info)
        self._batch = batch, partition, int(prompts.meta_info["global_steps"])

    def _put(self) -> KVBatchMeta:
        """Put the batch into TransferQueue."""
        assert self._batch is not None
        batch, partition, step = self._batch
        n, rows = self._samples[partition], rows_of(batch)
        if partition == VALIDATION:
            # As under RayPPOTrainer: one value, of which ``reward_info.per_sample`` makes columns.
            for row in rows:
                row["extra_fields"][REWARD_INFO] = {REWARD_INFO: row["extra_fields"].get(REWARD_INFO, {})}
        keys = [f"{row['uid']}_{i % n}_0" for i, row in enumerate(rows)]
        tags = [_tag(row, step) for row in rows]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(rows), tags=tags)
        return KVBatchMeta(partition_id=partition, keys=keys, tags=tags)


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """The samples of ``batch`` (``assemble_batch``) as v1 has them in TransferQueue: tensors of their own lengths.

    ``extra_fields`` has the columns that v1 does not read by name. A sample without a response has a token outside of the
    loss, the batch's padding: verl's nested tensors have no empty row.

    Raises:
        ValueError: the batch has a tensor that would be lost.
    """
    unknown = sorted(set(batch.batch.keys()) - _MADE_OF)
    if batch.batch["position_ids"].dim() > 2:
        unknown.append("position_ids")
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: the recipe's batches under v1 have no such tensor (trainer.use_v1=False)"
        )
    width = batch.batch["prompts"].shape[1]
    sizes = batch.batch["attention_mask"][:, :width].sum(1).tolist()
    lengths = batch.batch["attention_mask"][:, width:].sum(1).clamp(min=1).tolist()
    columns, rows = batch.non_tensor_batch, []
    for i, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        values = {key: column[i] for key, column in columns.items()}
        prompt, response = batch.batch["prompts"][i, width - size :], batch.batch["responses"][i, :length]
        row = {key: batch.batch[key][i, :length] for key in _OF_RESPONSE if key in batch.batch.keys()}  # noqa: SIM118
        row |= {"prompts": prompt, "responses": response, "loss_mask": row["response_mask"]}
        row |= {"input_ids": torch.cat([prompt, response]), "position_ids": torch.arange(size + length)}
        row |= {"multi_modal_inputs": {}, **{key: values.pop(key) for key in _COLUMNS if key in values}}
        row |= {"num_turns": int(values.pop("__num_turns__")), "extra_fields": values}
        rows.append(row)
    return rows


def _tag(row: dict[str, Any], step: int) -> dict[str, Any]:
    """What v1's balance and metrics read of a row of step ``step``."""
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
