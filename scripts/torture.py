#!/usr/bin/env python3
"""Run seeded schedules of the engine against the oracle, in virtual time.

    scripts/torture.py --seed 1 --seeds 100 --requests 200

A failure prints the one command that replays it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

from headrace.server.sim.torture import torture

COUNTED = (
    *("requests", "refused", "steps", "retractions", "cached_tokens", "host_tokens", "storage_tokens"),
    *("overrun_tokens", "device_restarts", "agent_restarts"),
)


MEANING = {
    "refused": "refused (queue full, or could never fit)",
    "ended by error": "ended by error (their device was killed)",
    "overrun_tokens": "ids computed past an end, and dropped",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run (default 1)")
    parser.add_argument("--requests", type=int, default=200, help="requests a seed (default 200)")
    options = parser.parse_args()
    # Deaths and hangs are what this is about: that the engine reports them is no news here.
    logging.disable(logging.CRITICAL)
    totals: Counter[str] = Counter()
    began = time.process_time()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            report = torture(seed, options.requests)
        except BaseException:
            traceback.print_exc()
            print(f"\nreplay: {sys.executable} {sys.argv[0]} --seed {seed} --requests {options.requests}")
            return 1
        totals.update({f"ended by {reason}": count for reason, count in report.ends.items()})
        totals.update({name: getattr(report, name) for name in COUNTED})
    cpu_s = time.process_time() - began
    for name, count in totals.items():
        print(f"{MEANING.get(name, name):44} {count:>10}")
    print(f"{'requests a CPU-second, all checks on':44} {totals['requests'] / cpu_s:>10.0f}")
    print(f"{options.seeds} seeds: every id was the oracle's, and everything was given back.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
