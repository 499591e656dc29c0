"""Tokens that represent a space as ▁ and a byte as <0xHH>."""

import re

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def with_marks(text: str) -> str:
    return text.replace(" ", SPACE)


def without_marks(text: str) -> str:
    return text.replace(SPACE, " ")


def marked_bytes(token: str) -> bytes:
    """The bytes of an ordinary or byte token."""
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return without_marks(token).encode(errors="replace")
