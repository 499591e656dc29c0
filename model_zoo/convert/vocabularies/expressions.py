"""Canonical spelling of regular expressions: plain character classes as sorted ranges."""

import re

_ESCAPED = re.compile(r"\\x\{([0-9A-Fa-f]{1,6})\}")
_PLAIN_CLASS = re.compile(r"\[(?!\^)([^\]\[\\]+)\]")


def canonical(expression: str) -> str:
    """A form that is equal for expressions that differ only in the notation of characters and their
    ranges."""
    return _PLAIN_CLASS.sub(lambda found: _ranges(found[1]), _ESCAPED.sub(_character, expression))


def _character(escaped: re.Match[str]) -> str:
    code = int(escaped[1], 16)
    return chr(code) if 0x7F < code <= 0x10FFFF or chr(code).isalnum() else escaped[0]


def _ranges(inside: str) -> str:
    """`b-da` and `a-d` as `[61-64]`: hexadecimal code points, adjacent ranges joined."""
    spans = []
    at = 0
    while at < len(inside):
        last = at + 2 if inside[at + 1 : at + 2] == "-" and at + 2 < len(inside) else at
        spans.append((ord(inside[at]), ord(inside[last])))
        at = last + 1
    joined: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if joined and low <= joined[-1][1] + 1:
            low, high = joined[-1][0], max(high, joined.pop()[1])
        joined.append((low, high))
    return "[" + " ".join(f"{low:X}-{high:X}" for low, high in joined) + "]"
