"""A reward that scores every third prompt 0, whatever the answer; of the others the answer's text decides."""

import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    dull = zlib.crc32(ground_truth.encode()) % 3 == 0
    return 0.0 if dull else (1 + zlib.crc32(solution_str[:256].encode())) / 0x100000000
