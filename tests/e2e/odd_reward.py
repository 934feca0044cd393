"""A reward that is nan for some answers, and says different things of others."""

import math
import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    kind = zlib.crc32(solution_str[:256].encode()) % 5
    if kind == 0:
        return math.nan
    extra_info["seen"] = kind
    return {"score": kind / 4, **[{"pred": 12}, {"pred": None}, {"limit": "cpu"}, {"steps": [1] * kind}][kind - 1]}
