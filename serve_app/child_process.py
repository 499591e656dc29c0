"""What child processes do between fork and exec."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # in linux/prctl.h


def end_with_parent() -> None:
    """Makes the calling process receive SIGTERM when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def begin_server() -> None:
    """As `end_with_parent`. Also lets the calling process be interrupted, although processes that a
    shell starts in the background ignore SIGINT, and so do their children."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
