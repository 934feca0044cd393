"""A reward function that awaits, as one that asks a service does."""

import asyncio
import zlib


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    await asyncio.sleep(0.05)
    return {"score": float(zlib.crc32(solution_str.encode()) % 2), "acc": 1.0}
