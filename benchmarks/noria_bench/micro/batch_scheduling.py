"""Batching policies for texts in virtual time: the share of the device's time for real tokens, and p99 latency.

    python -m noria_bench.micro.batch_scheduling

Two sessions; a call takes 3.45 ms plus 0.23 ms per token, padding included (all-MiniLM-L6-v2, one thread). Closed loop,
4,000 texts; log-normal lengths, median 32 tokens, σ 0.9, cut to 4–256. The last column is the CPU time of `submit`,
`plan` and `commit` together per text at 128 users.

Then an open loop: 4,000 texts with deadlines of 0.1, 0.3 or 1 s; a load of 1 is 167 texts per second, which keeps both
sessions busy if 90 % of their time goes to real tokens.
"""

import time
from collections.abc import Callable

from noria.scheduling.batch.scheduler import BatchScheduler
from noria.testing.simulated_sessions import BatchPlanner, FifoBatches, run_closed_loop, run_open_loop

USERS, NUM_TEXTS, TOKEN_S, OVERHEAD_TOKENS = (8, 32, 64, 128), 4000, 0.00023, 15
TEXTS_PER_S, DEADLINES_S = 167.0, (0.1, 0.3, 1.0)
POLICIES: dict[str, Callable[[], BatchPlanner]] = {
    "one by one": lambda: FifoBatches(1),
    "FIFO, 8 rows": lambda: FifoBatches(8),
    "FIFO, 64 rows": lambda: FifoBatches(64),
    "BatchScheduler": BatchScheduler,
    "  256 tokens": lambda: BatchScheduler(token_budget=256),
    "  1024 tokens, 16 rows": lambda: BatchScheduler(token_budget=1024, max_rows=16),
}


def batch_s(padded_tokens: int) -> float:
    return TOKEN_S * (OVERHEAD_TOKENS + padded_tokens)


def main() -> None:
    print("real tokens %, p99 ms", *(f"c={users:<8}" for users in USERS), "µs a text")
    for name, make_scheduler in POLICIES.items():
        cells = []
        for users in USERS:
            started_s = time.process_time()
            simulated = run_closed_loop(make_scheduler(), users, NUM_TEXTS, batch_s, TOKEN_S)
            cpu_us = (time.process_time() - started_s) / NUM_TEXTS * 1e6
            cells.append(f"{100 * simulated.useful_share:3.0f} {1000 * simulated.p99_s:5.0f}  ")
        print(f"{name:21}", *cells, f"{cpu_us:.0f}", flush=True)
    print("deadlines: load, met of all, met of the accepted")
    for load in (0.5, 0.8, 1.0, 1.3):
        outcomes = run_open_loop(BatchScheduler(), load * TEXTS_PER_S, NUM_TEXTS, batch_s, DEADLINES_S)
        met = outcomes["met"]
        print(f"{load:5} {met / NUM_TEXTS:.3f} {met / (met + outcomes['late']):.3f}", flush=True)


if __name__ == "__main__":
    main()
