"""The filters, methods and operators that make much out of little, checked before they run."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.sandbox import SecurityError

from model_zoo.sandbox.budget import Budget

MAX_WIDTH = 1000
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")
# A field that is wide, or whose width is itself a field.
_WIDE_FIELD = re.compile(r"(?<!\{)\{[^{}]+\{|\{[^{}]*\d{4}")
# What filters may take whose time does not only grow with what they are given.
_SHORT, _SHOWN = 1 << 12, 1 << 16
_FORBIDDEN_METHODS = frozenset({"translate", "maketrans"})
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "hex"})

Prepared = tuple[Any, ...]


def check_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """SecurityError before an operation that would take too long or make too much."""
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if operator == "**" and not (numbers and abs(left) < 2**32 and abs(right) < 64):
        raise SecurityError("a power is too large")
    if operator == "*" and not numbers:
        count = max(abs(side) for side in (left, right, 1) if isinstance(side, int))
        budget.allow(max(budget.size(left), budget.size(right)) * count)
    elif operator == "*":
        _check_number(left)
        _check_number(right)
    elif operator == "%" and isinstance(left, str):
        check_percent(budget, left, right)
    elif operator == "+" and not numbers:
        budget.allow(budget.size(left) + budget.size(right))


def check_percent(budget: Budget, text: str, values: Any) -> None:
    if _WIDE_PERCENT.search(text):
        raise SecurityError("a text format is too wide")
    budget.allow(len(text) + text.count("%") * budget.size(values))


def check_format(text: str) -> None:
    if _WIDE_FIELD.search(text):
        raise SecurityError("a text format is too wide")


def check_method(budget: Budget, method: Any, args: Prepared, named: Mapping[str, Any]) -> Prepared:
    """The arguments for a call of `method`, iterators among them as lists."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if name in _FORBIDDEN_METHODS:
        raise SecurityError(f"the method {name} is not allowed")
    if name in _PADDING_METHODS:
        check_widths(args, named)
    if name == "join" and isinstance(owner, str | bytes) and args:
        args = (_listed(budget, args[0]), *args[1:])
        budget.allow(budget.size(args[0]) + len(args[0]) * len(owner))
    if name == "replace" and isinstance(owner, str) and len(args) >= 2:
        check_replace(budget, owner, str(args[0]), str(args[1]))
    if name in ("format", "format_map"):
        fields = len(getattr(method, "template", ""))
        budget.allow(fields + fields * (budget.size(args) + budget.size(named)) // 2)
    return args


def check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.allow(len(text) + text.count(old) * len(new))


def check_widths(args: Prepared, named: Mapping[str, Any]) -> None:
    for value in (*args, *named.values()):
        too_wide = isinstance(value, int | float) and not -MAX_WIDTH <= value <= MAX_WIDTH
        if too_wide or (isinstance(value, str) and len(value) > MAX_WIDTH):
            raise SecurityError(f"a width is above {MAX_WIDTH}")


def check_filter(budget: Budget, name: str, args: Prepared, named: Mapping[str, Any]) -> None:
    """`args` begin with what is filtered."""
    value, options = args[0] if args else "", args[1:]
    check = _FILTER_CHECKS.get(name)
    if check is not None:
        check(budget, value, options, named)


def _check_number(value: int | float) -> None:
    if isinstance(value, int) and abs(value) >= 1 << 4096:
        raise SecurityError("a number is too large")


def _listed(budget: Budget, values: Iterable[Any]) -> list[Any]:
    return values if isinstance(values, list) else list(budget.counted(values))


def _padded(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    check_widths(options, named)


def _lined(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    """What puts a text before or behind each line."""
    check_widths(options, named)
    given = [*options, *named.values()]
    widest = max((len(v) if isinstance(v, str) else int(v) for v in given), default=0)
    lines = len(str(value)) if "wrapstring" in named or len(options) > 2 else str(value).count("\n")
    budget.allow(len(str(value)) + (lines + 1) * max(widest, 4))


def _replaced(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    old = options[0] if options else named.get("old", "")
    new = options[1] if len(options) > 1 else named.get("new", "")
    check_replace(budget, str(value), str(old), str(new))


def _joined(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    between = options[0] if options else named.get("d", "")
    count = len(value) if hasattr(value, "__len__") else 1
    budget.allow(budget.size(value) + count * budget.size(between))


def _formatted(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    check_percent(budget, str(value), options or dict(named))


def _summed(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    start = options[1] if len(options) > 1 else named.get("start", 0)
    if not isinstance(start, int | float):
        raise SecurityError("only numbers can be summed")


def _as_json(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    indent = options[1] if len(options) > 1 else named.get("indent")
    width = len(indent) if isinstance(indent, str) else indent or 0
    if not isinstance(width, int) or not 0 <= width <= 32:
        raise SecurityError("an indent is above 32")
    if width:
        budget.allow(budget.size(value) * (1 + width * budget.depth(value)) // 4)


def _short(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    _allow_slow(budget, sum(map(budget.size, (value, options, named))), _SHORT)


def _shown(budget: Budget, value: Any, options: Prepared, named: Mapping[str, Any]) -> None:
    """Every value is written anew at each level around it."""
    _allow_slow(budget, budget.size(value) * max(budget.depth(value), 1), _SHOWN)


def _allow_slow(budget: Budget, units: int, limit: int) -> None:
    budget.step(units)
    if units > limit:
        raise SecurityError(f"a value of {units:,} characters is too large for its filter")


_FILTER_CHECKS: Mapping[str, Callable[[Budget, Any, Prepared, Mapping[str, Any]], None]] = {
    **dict.fromkeys(("center", "batch", "slice", "round", "truncate"), _padded),
    **dict.fromkeys(("indent", "wordwrap"), _lined),
    **dict.fromkeys(("striptags", "urlize", "xmlattr"), _short),
    "pprint": _shown,
    "replace": _replaced,
    "join": _joined,
    "format": _formatted,
    "sum": _summed,
    "tojson": _as_json,
}
