"""A reward function that awaits a process of its own for each score."""

import asyncio
import sys

_SCORE = "import sys, zlib; print(zlib.crc32(sys.stdin.buffer.read()) % 2)"


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _SCORE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await process.communicate(solution_str.encode())
    return {"score": float(answer), "exit_code": float(process.returncode or 0)}
