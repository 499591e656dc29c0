"""Tokens that represent a space as ▁ and a byte as <0xHH>."""

import re

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def with_marks(text: str) -> str:
    return text.replace(" ", SPACE)


def without_marks(text: str) -> str:
    return text.replace(SPACE, " ")


def byte_of(token: str) -> int | None:
    """The byte that a token represents; None for ordinary tokens."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return None if byte is None else int(byte[1], 16)


def marked_bytes(token: str) -> bytes:
    """The bytes of an ordinary or byte token."""
    value = byte_of(token)
    return without_marks(token).encode(errors="replace") if value is None else bytes([value])
