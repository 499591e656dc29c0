"""Structured log lines of the application on standard error, by default one JSON object each.

`CARAVAN_LOG_FORMAT=text` writes readable lines instead. `CARAVAN_LOG_LEVEL` is `info` by default,
`debug`, which adds a line for each request, or `warning`. Lines of a request have its id. Lines
never contain texts of users or keys.
"""

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from traceback import format_tb
from typing import Any

import structlog

from serve_app.telemetry.request_context import current_request

FORMAT, LEVEL = "CARAVAN_LOG_FORMAT", "CARAVAN_LOG_LEVEL"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_PACKAGES = ("runtime", "model_zoo", "serve_app")
MOST_CAUSES = 8


class _StandardError:
    """Reads `sys.stderr` for each line, because Ray replaces it after this module is imported."""

    def info(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    debug = warning = error = info


def get_logger(environment: Mapping[str, str] = os.environ) -> structlog.stdlib.BoundLogger:
    """A logger without global configuration, so that it is the same in every Ray process."""
    text = environment.get(FORMAT) == "text"
    return structlog.wrap_logger(
        _StandardError(),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            _add_request,
            *([] if text else [_event_first]),
            structlog.dev.ConsoleRenderer(colors=False)
            if text
            else structlog.processors.JSONRenderer(ensure_ascii=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_level(environment)),
    )


class StructuredHandler(logging.Handler):
    """Writes records of `logging` like lines of `get_logger`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._log = get_logger(environment)

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, Any] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            facts |= without_texts(record.exc_info[1])
        self._log.log(min(record.levelno, logging.ERROR), record.getMessage(), **facts)


def structure_records(environment: Mapping[str, str] = os.environ) -> None:
    """Make `logging` write records of this project's modules like the lines of `get_logger`, from
    the same level on."""
    for name in _PACKAGES:
        logger = logging.getLogger(name)
        logger.setLevel(_level(environment))
        if not any(isinstance(each, StructuredHandler) for each in logger.handlers):
            logger.addHandler(StructuredHandler(environment))


def without_texts(error: BaseException) -> dict[str, str]:
    """The types and places of an unexpected exception and its causes, without their texts, which
    may quote a user."""
    kinds: list[str] = []
    frames: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(kinds) < MOST_CAUSES:
        kinds.append(type(cause).__name__)
        frames += [*format_tb(cause.__traceback__), f"{kinds[-1]}\n"]
        cause = cause.__cause__ or cause.__context__
    return {"error": " from ".join(kinds), "traceback": "".join(frames)}


def _level(environment: Mapping[str, str]) -> int:
    return _LEVELS.get(environment.get(LEVEL, ""), logging.INFO)


def _add_request(
    logger: Any, method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    context = current_request.get()
    if context is not None and context.id:
        line.setdefault("request", context.id)
    return line


def _event_first(
    logger: Any, method: str, line: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    return {"event": line.pop("event"), **line}
