"""Children that end when their parent does, even if that is killed."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent() -> None:
    """Call it in the child, between fork and exec: it gets SIGTERM when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
