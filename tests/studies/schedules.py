"""``python -m tests.studies.schedules``: forecasts of scheduling policies and limits on overtaking, as JSON lines.

``tools plan`` answers users, for the run's own schedule; this varies the schedule. It also reports whether short groups
come first, which a limit on overtaking prevents. Takes ``plan``'s options.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from recipe.partial_rollout.tools.plan import inputs, parser
from recipe.partial_rollout.tools.planner.rounds import Simulation, baseline, forecast
from recipe.partial_rollout.tools.run_record import load_run

FIRST = 5
"""rounds whose trained lengths are compared with those of as many groups in dispatch order"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print an object a schedule: rollout time over noPR's, staleness, and mean length first trained over dispatched."""
    made = parser()
    made.add_argument(
        "--policies", type=SchedulingPolicy, nargs="+", default=list(SchedulingPolicy), help="to forecast"
    )
    made.add_argument("--overtake", type=json.loads, nargs="+", default=[None], help="shares of a batch, or null")
    made.add_argument("--rounds", type=int, default=300, help="of each forecast: relative error 1 / sqrt(2 N)")
    options = made.parse_args(arguments)
    record = load_run(options.run_directory) if options.run_directory else None
    settings, cluster, lengths, _ = inputs(options, record)
    base = forecast(baseline(settings), cluster, lengths, rounds=options.rounds)
    for policy in options.policies:
        for overtake in options.overtake:
            for overlap in (each for each in sorted(options.overlaps) if each <= settings.max_staleness):
                sized = replace(settings, overlap=overlap, scheduling=Scheduling(policy, overtake))
                found = forecast(sized, cluster, lengths, rounds=options.rounds)
                simulation = Simulation(sized, cluster, lengths)
                first = np.concatenate([each.lengths for each in simulation.rounds(FIRST)])
                dispatched = np.array(simulation.dispatched[: len(first)])
                of = {"policy": policy, "overtake": overtake, "overlap": overlap}
                relative = base.trained_tokens_per_s / found.trained_tokens_per_s
                bias = float(first.mean() / dispatched.mean())
                print(json.dumps(of | {"rollout": relative, "first_length": bias} | asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
