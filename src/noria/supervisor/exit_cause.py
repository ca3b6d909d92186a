"""How a process ended, and whether one of an engine's requests may have caused its exit. Pure.

"crashed" is anything that a request may have caused: an exit status of its own, SIGSEGV, SIGABRT, a hang, an
out-of-memory kill. "killed" is a signal from an operator or orchestrator, which no request causes.
"""

import signal

from noria.protocol.messages import ExitCause

_EXTERNAL_SIGNALS = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))


def classify_exit(status: int, *, hung: bool, num_oom_kills: int) -> ExitCause:
    """Classify the exit `status` of an engine; a negative status is a signal, as in `subprocess`.

    An engine exits with 0 only when told to end. `hung`: the supervisor killed it because it hung. `num_oom_kills`: how
    many processes of its control group the kernel's OOM killer has killed since its start; those exits too are by
    SIGKILL.
    """
    is_external = status == 0 or -status in _EXTERNAL_SIGNALS
    return "killed" if is_external and not hung and num_oom_kills == 0 else "crashed"


def combine_exits(earlier: ExitCause, later: ExitCause) -> ExitCause:
    """Combine the exit causes of two consecutive runs, where the later one never became ready.

    Clients used the earlier.
    """
    return "crashed" if "crashed" in (earlier, later) else later


def describe_status(status: int) -> str:
    """How a process ended, for messages: "with status 1", "by SIGKILL"; real-time signals have no names."""
    if status >= 0:
        return f"with status {status}"
    names = {int(each): each.name for each in signal.Signals}
    return f"by {names.get(-status, f'signal {-status}')}"
