"""Structured log lines of the application: one JSON object per line, on standard error."""

import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


class _StandardError:
    """Reads `sys.stderr` for each line, because Ray replaces it after this module is imported."""

    def info(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    warning = error = info


def get_logger() -> structlog.stdlib.BoundLogger:
    """A logger without global configuration, so that it is the same in every Ray process."""
    return structlog.wrap_logger(
        _StandardError(),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _event_first,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
    )


def _event_first(
    logger: Any, method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    return {"event": line.pop("event"), **line}
