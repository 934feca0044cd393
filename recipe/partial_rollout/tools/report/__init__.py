"""Compares two finished runs: `python -m recipe.partial_rollout.tools report DIR_A DIR_B [--out DIR]`.

    run directory -> run_record -> summary -> comparison -> findings, table  -> report.md, report.json, console
                                                         -> timeline, panels -> timeline.png, report.png

Everything is computed from the three files that a run writes (`run.json`, `metrics.jsonl`, `trace.jsonl`); nothing here
imports verl, torch or Ray, so a report can be made on any machine.
"""
