"""What a pass gave for a row is found again by the row's tokens, in whatever batch and order."""

import pytest
import torch
from verl.protocol import DataProto

from recipe.partial_rollout.training.row_results import RowResults, row_keys

P, R = 3, 4


def build_rows(*samples):
    """Rows of (prompt, response): the prompt padded on the left, the response on the right."""
    ids, mask = torch.zeros(len(samples), P + R, dtype=torch.int64), torch.zeros(len(samples), P + R, dtype=torch.int64)
    for i, (prompt, response) in enumerate(samples):
        ids[i, P - len(prompt) : P + len(response)] = torch.tensor([*prompt, *response])
        mask[i, P - len(prompt) : P + len(response)] = 1
    return DataProto.from_single_dict({"prompts": ids[:, :P], "input_ids": ids, "attention_mask": mask})


A, B, C, D = ([1], [2, 3]), ([1, 2], [3]), ([4], [5]), ([6], [7, 8, 9])


class Forward:
    """A pass whose result is the sum of the row's tokens; it reverses the rows, as one that balances may."""

    def __init__(self):
        self.asked = []

    def __call__(self, rows):
        rows.reorder(torch.arange(len(rows) - 1, -1, -1))
        self.asked.append(len(rows))
        return DataProto.from_single_dict({"sum": rows.batch["input_ids"].sum(dim=1, keepdim=True).float()})


def sums(results):
    return results.batch["sum"].squeeze(1).tolist()


def test_rows_are_told_apart_by_where_the_prompt_ends():
    keys = row_keys(build_rows(A, B, A))
    assert keys[0] == keys[2] != keys[1]


def test_padding_does_not_matter():
    rows, padded = build_rows(A), build_rows(A)
    padded.batch["input_ids"][0, -1] = 99
    assert row_keys(rows) == row_keys(padded)


def test_batch_gets_its_results_in_its_own_order():
    forward = Forward()
    results = RowResults(forward, unit=1)
    results.compute(build_rows(A, C))
    results.compute(build_rows(D))
    batch = build_rows(D, A, C)
    assert results.known(batch) == 3
    assert sums(results.of(batch)) == [30.0, 6.0, 9.0]
    assert forward.asked == [2, 1]


def test_only_the_rows_that_are_missing_are_computed():
    forward = Forward()
    results = RowResults(forward, unit=1)
    results.compute(build_rows(A, C))
    batch = build_rows(A, B, D, C)
    assert sums(results.of(batch)) == [6.0, 6.0, 30.0, 9.0] and forward.asked == [2, 2]
    assert row_keys(batch) == row_keys(build_rows(A, B, D, C)), "the batch keeps its order"


@pytest.mark.parametrize(("unit", "asked"), [(2, [2, 2]), (4, [2, 4])])
def test_pass_gets_a_multiple_of_its_unit(unit, asked):
    forward = Forward()
    results = RowResults(forward, unit)
    results.compute(build_rows(A, C))
    if unit == 4:
        assert sums(results.of(build_rows(A, B, D, C))) == [6.0, 6.0, 30.0, 9.0]
    else:
        assert sums(results.of(build_rows(A, D))) == [6.0, 30.0]
    assert forward.asked == asked


def test_rows_that_a_batch_has_twice_are_no_less_used():
    results = RowResults(Forward(), unit=1)
    results.compute(build_rows(A, A, B, C))
    batch = build_rows(A, A, B)
    assert results.known(batch) == 3 and results.unused(batch) == 1


def test_results_of_other_weights_are_forgotten():
    forward = Forward()
    results = RowResults(forward, unit=1)
    results.compute(build_rows(A))
    results.forget()
    assert results.known(build_rows(A)) == 0
    results.of(build_rows(A))
    assert forward.asked == [1, 1]
