"""The threads in which the blocking calls of jobs run."""

from noria.errors import JobsUnavailable
from noria.storage import thread_offloader
from noria.storage.outage_log import OutageLog

NUM_REQUEST_THREADS = 8  # for routes, webhooks and cleaning up
# For claims and leases, and for files: pools of their own, so that they never queue behind a hundred slow readers.
NUM_WORKER_THREADS = 4
NUM_WORKERS = 2  # workers of a front end: one for each kind of model


class ThreadOffloader(thread_offloader.ThreadOffloader):
    """Runs calls of jobs; raises JobsUnavailable."""

    def __init__(
        self, num_threads: int = NUM_REQUEST_THREADS, max_wait_s: float | None = None, outages: OutageLog | None = None
    ) -> None:
        super().__init__(JobsUnavailable, "jobs' database", "jobs' results folder", num_threads, max_wait_s, outages)
