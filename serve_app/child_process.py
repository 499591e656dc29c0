"""Child processes that end with their parent, even if it is killed."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # in linux/prctl.h


def end_with_parent() -> None:
    """Makes the calling process receive SIGTERM when its parent ends. Call it between fork and
    exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
