"""Clock-10 operator search: the embedded task of the quick start, tests and benchmarks.

The package holds the task end to end: problems, demonstrations, tokenizer, model, warm start, parquet data and reward.
Everything is generated from a seed, so a checkout needs no download; `ready_start` writes the result to a folder.
"""
