"""How an engine ended, as far as that tells whether a request of its may have been guilty.

"crashed" is anything that a request may have caused: an exit status of its own, SIGSEGV, SIGABRT, a hang, no memory left. "killed" is
what operators and orchestrators do: they send signals, and no request does.
"""

import signal

from noria.protocol.messages import ExitCause

_EXTERNAL_SIGNALS = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))


def classify_exit(status: int, *, hung: bool, num_oom_kills: int) -> ExitCause:
    """What `status`, of waitpid's kind (negative is a signal), means.

    An engine exits with 0 only when SIGTERM asked it to. `hung`: the supervisor killed it for that. `num_oom_kills`: how many processes
    of its control group the kernel has killed for want of memory since it was started; that signal too is SIGKILL.
    """
    is_external = status == 0 or -status in _EXTERNAL_SIGNALS
    return "killed" if is_external and not hung and num_oom_kills == 0 else "crashed"


def combine_exits(earlier: ExitCause, later: ExitCause) -> ExitCause:
    """The end to tell of two lives in a row, of which the second told nobody that it was ready: its peers ask about the first."""
    return "crashed" if "crashed" in (earlier, later) else later
