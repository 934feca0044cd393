"""What a forward pass gave for rows of a batch, found again by the rows' tokens.

A row's results depend on its tokens and the weights alone, so a batch may take them from another pass over other rows.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import torch
from verl.protocol import DataProto

Forward = Callable[[DataProto], DataProto]
"""rows in, and for each of them one row of each result"""


def row_keys(rows: DataProto) -> list[bytes]:
    """One a row: equal for rows with the same prompt and the same response."""
    tokens, mask = rows.batch["input_ids"], rows.batch["attention_mask"].bool()
    prompt_width = rows.batch["prompts"].shape[1]
    prompts = mask[:, :prompt_width].sum(dim=1).tolist()
    return [
        blake2b(tokens[i][mask[i]].numpy().tobytes(), digest_size=16, salt=prompt.to_bytes(8, "little")).digest()
        for i, prompt in enumerate(prompts)
    ]


class RowResults:
    """Results of passes under the same weights.

    Args:
        forward: the pass. It may change the order of the rows that it gets; its results are in the new order.
        unit: it takes a multiple of so many rows.
    """

    def __init__(self, forward: Forward, unit: int) -> None:
        self._forward = forward
        self._unit = unit
        self._at: dict[bytes, tuple[DataProto, int]] = {}

    def forget(self) -> None:
        """Drop all: the weights are about to change."""
        self._at.clear()

    def compute(self, rows: DataProto) -> None:
        """Run the pass over ``rows``."""
        results = self._forward(rows)
        self._at.update((key, (results, i)) for i, key in enumerate(row_keys(rows)))

    def known(self, rows: DataProto) -> int:
        """Rows whose results are here."""
        return sum(key in self._at for key in row_keys(rows))

    def unused(self, batch: DataProto) -> int:
        """Different rows whose results are here, and that ``batch`` does not have."""
        return len(self._at.keys() - set(row_keys(batch)))

    def of(self, batch: DataProto) -> DataProto:
        """Results of all rows of ``batch``, in its order; runs the pass over those that are not here."""
        keys = row_keys(batch)
        missing = [i for i, key in enumerate(keys) if key not in self._at]
        if missing:
            here = [i for i, key in enumerate(keys) if key in self._at]
            self.compute(_rows(batch, missing + here[: -len(missing) % self._unit]))
        found = [self._at[key] for key in keys]
        names = list(found[0][0].batch.keys())
        return DataProto.from_single_dict(
            {name: torch.stack([results.batch[name][i] for results, i in found]) for name in names}
        )


def _rows(batch: DataProto, indices: list[int]) -> DataProto:
    chosen = batch.select_idxs(torch.tensor(indices))
    chosen.meta_info = dict(batch.meta_info)
    return chosen
