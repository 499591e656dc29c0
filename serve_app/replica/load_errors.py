"""Errors of loading a model or a vision encoder as one line each."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception

from runtime.errors import CaravanError
from serve_app.logs import get_logger

LONGEST_REASON = 300

log = get_logger()


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turns every exception into a CaravanError with one line that names `what`."""
    try:
        yield
    except CaravanError as error:
        raise type(error)(f"{what}: {error}") from None
    except Exception as error:
        raise explained(what, error) from error


def explained(what: str, error: Exception) -> CaravanError:
    """A one-line message that says why `what` could not be loaded. Exceptions of other packages are
    logged with their traceback.
    """
    if isinstance(error, CaravanError):
        return error
    log.error("unforeseen error", what=what, traceback="".join(format_exception(error)))
    lines = str(error).strip().splitlines()
    reason = f": {lines[0][:LONGEST_REASON]}" if lines else ""
    return CaravanError(f"{what} could not be loaded: {type(error).__name__}{reason}")
