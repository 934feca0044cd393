"""Reports of runs: `python -m recipe.partial_rollout.tools report RUN [RUN ...] [--out DIR]`.

    run directory -> run_record -> summary -> comparison -> findings, table -> report.md, report.json, console
                                                         -> timeline, panels      -> timeline.png, report.png
                                                         -> segments, page        -> report.html

Everything is computed from the two files that a run writes (`run.jsonl`, `metrics.jsonl`); nothing here
imports verl, torch or Ray, so a report can be made on any machine, also while the runs go on.
"""

import os

# Pictures need no window, and matplotlib cannot be imported with a backend of the user's that it does not know.
os.environ["MPLBACKEND"] = "agg"
