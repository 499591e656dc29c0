"""Parses lines of the log of `caravan serve`, of the application, Ray and other programs."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Ray writes "(actor pid=123)" before the lines of other processes, with "ip=..." on other nodes.
_PREFIX = re.compile(r"^\(([^()]*) pid=[^()]*\) ")
# Ray: "INFO 2026-11-23 17:00:44,821 controller 62 -- text" and "2026-11-23 17:00:39,742 INFO a.py:8
# -- text"; lines of CARAVAN_LOG_FORMAT=text: "2026-11-23T17:00:44Z [info     ] text".
_DATE = r"(?P<date>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[.,\d]*(?P<zone>Z?)"
_LEVEL = r"\[?(?P<level>[A-Z]{4,8}|debug|info|warning|error|critical)\s*\]?"
_RECORDS = tuple(
    re.compile(rf"^{first}\s+{second}\s+(?:[^\n]*? -- )?(?P<event>.*)$")
    for first, second in ((_DATE, _LEVEL), (_LEVEL, _DATE))
)
_NAMES_OF_LEVELS = {"succ": "info", "warn": "warning", "critical": "error", "fatal": "error"}
# Within a text: model=demo, or model='demo'.
_FACT = re.compile(r"(?<!\S)(model|request)='?([^\s',]+)")


@dataclass(frozen=True, slots=True)
class LogLine:
    """`source`: the actor, "" for the program itself. `level` None: the line continues the previous
    one, for example in a stack trace. `when`: local time, "" if unknown."""

    source: str
    level: str | None
    when: str
    event: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    models: Sequence[Any] = ()
    request: Any = None


def split_source(line: str) -> tuple[str, str]:
    """The actor that Ray names before a line ("" if none), and the text without colours."""
    plain = _ANSI.sub("", line).rstrip("\r\n")
    prefix = _PREFIX.match(plain)
    return (prefix[1], plain[prefix.end() :]) if prefix else ("", plain)


def structured(text: str) -> dict[str, Any] | None:
    """The JSON object in a line of the application; None for other lines."""
    if not text.startswith('{"event"'):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_line(line: str) -> LogLine:
    """One line of the log."""
    source, text = split_source(line)
    document = structured(text)
    if document is not None:
        level, event = _level(document.pop("level", "info")), str(document.pop("event"))
        when = _local(str(document.pop("timestamp", "")))
        several = document.get("models")
        models = [document.get("model"), *(several if isinstance(several, list) else [])]
        return LogLine(source, level, when, event, document, models, document.get("request"))
    for pattern in _RECORDS:
        if (found := pattern.match(text)) and (known := _level(found["level"])):
            event, when = found["event"], _local(found["date"] + found["zone"])
            facts = dict(_FACT.findall(event))
            models = [facts.get("model")]
            return LogLine(source, known, when, event, {}, models, facts.get("request"))
    return LogLine(source, None, "", text)


class LogFilter:
    """Selects lines of at least `level` that name `model` and `request`; None selects all.

    Lines without a level are selected if the previous line of the same source is.
    """

    def __init__(self, *, level: str, model: str | None, request: str | None) -> None:
        self._least = LEVELS.index(level)
        self._model, self._request = model, request
        self._unfiltered = level == LEVELS[0] and model is None and request is None
        self._last: dict[str, bool] = {}

    def selects(self, line: LogLine) -> bool:
        if line.level is None:
            return self._last.get(line.source, self._unfiltered)
        self._last[line.source] = (
            LEVELS.index(line.level) >= self._least
            and self._model in (None, *line.models)
            and self._request in (None, line.request)
        )
        return self._last[line.source]


def _level(name: Any) -> str | None:
    lower = str(name).lower()
    known = _NAMES_OF_LEVELS.get(lower, lower)
    return known if known in LEVELS else None


def _local(timestamp: str) -> str:
    """A date as in ISO 8601, in local time without a fraction of the second."""
    try:
        return datetime.fromisoformat(timestamp).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""
