"""Two thousand rounds over scripted engines: the memory of driver, manager and workers does not grow with them."""

import gc
import os
import sys

import numpy as np
import psutil
import pytest
import ray

from recipe.partial_rollout.config.settings import Placement
from tests.integration.scripted_training import ScriptedTraining

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROUNDS = int(os.environ.get("PARTIAL_ROLLOUT_SOAK_ROUNDS", 2000))
WARM_UP = ROUNDS // 10
MOST_BLOCKS = 5
"""blocks of Python's memory that a round may leave behind in a process"""
MOST_KIB = 8
"""memory that a round may leave behind in a process, Ray's own included: an idle actor keeps 20 bytes a call"""


def memory_here(_=None):
    gc.collect()
    return psutil.Process().memory_info().rss / 1024, sys.getallocatedblocks()


def memory_of(training):
    """Of the driver, the manager and each worker: KiB of the process, and Python's blocks."""
    actors = [training.manager, *training.workers]
    return [memory_here(), *ray.get([actor.__ray_call__.remote(memory_here) for actor in actors], timeout=60)]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("placement", list(Placement))
def test_memory_is_flat_over_two_thousand_rounds(placement, tmp_path, capsys):
    soak, seen = ScriptedTraining(tmp_path, placement, 2 * ROUNDS), []
    soak.begin()
    for step in range(1, ROUNDS + 1):
        soak.step(step)
        if step >= WARM_UP and step % 20 == 0:
            seen.append(memory_of(soak))
    rounds = np.arange(len(seen)) * 20
    # [process, KiB or blocks]: least squares over the rounds after the first tenth.
    slopes = np.polyfit(rounds, np.array(seen).reshape(len(seen), -1), 1)[0].reshape(-1, 2)
    kib, blocks = np.round(slopes.T, 2).tolist()
    with capsys.disabled():
        print(f"\n{placement}, {ROUNDS} rounds; driver, manager, workers: {kib} KiB and {blocks} blocks a round")
    assert max(kib) < MOST_KIB and max(blocks) < MOST_BLOCKS
