"""A small vocabulary of PLaMo 2, as lines of its tokenizer.jsonl, and its authors' algorithm."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

HEAD = ("unk", "bos", "eos", "pad", "op")
PIECES = {
    " ": -3.0, "\n": -4.0, "a": -5.0, "b": -5.0, "c": -5.5, "ab": -9.0, "ba": -9.0, "aba": -13.25,
    "aa": -10.0, "aaa": -15.0, "the": -6.1, " the": -6.4, "t": -7.0, "h": -7.0, "e": -7.0,
    " quick": -9.5, "ick": -9.0, "東": -9.0, "東京": -10.0, "▁": -11.0, "👍🏽": -12.0,
    "</s>": -12.0,
}  # fmt: skip
Row = tuple[str, float, str]
ROWS: tuple[Row, ...] = (
    *((f"<|plamo:{name}|>", 0.0, "UNKNOWN" if name == "unk" else "CONTROL") for name in HEAD),
    *((f"<0x{value:02X}>", 0.0, "BYTE") for value in range(256)),
    *((text, score, "NORMAL") for text, score in PIECES.items()),
)
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "Plamo2Tokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<|plamo:bos|>",
    "eos_token": "<|plamo:eos|>",
    "unk_token": "<|plamo:unk|>",
    "pad_token": "<|plamo:pad|>",
}
TEXTS = (
    "the quick quick the",
    "abaab abba aaaaa aaaaaaab",
    "東京 東 京都 👍🏽 👍 🏽",
    "\ufeffthe\ufeff \uffff \x00 ▁ é",
    "</s> <0x41> <|plamo:op|",
    "",
)


def authors_ids(text: str, rows: Sequence[Row] = ROWS) -> list[int]:
    """From the end of the text to its beginning: the best tokens of the rest, of equally good ones
    those with the longest first token; a character that is no token costs 1,000."""
    scores = {piece: (round(score * 1e4), id) for id, (piece, score, kind) in enumerate(rows)
              if kind == "NORMAL" and isfinite(score)}  # fmt: skip
    of_bytes = {int(piece[3:5], 16): id for id, (piece, _, kind) in enumerate(rows)
                if kind == "BYTE"}  # fmt: skip
    best: list[tuple[int, list[int]]] = [(0, [])]
    longest = max(map(len, scores))
    for begin in range(len(text) - 1, -1, -1):
        rest = best[-1]
        as_bytes = [of_bytes[value] for value in text[begin].encode()]
        found = [(rest[0] - 10_000_000, as_bytes + rest[1])]
        for size in range(1, min(longest, len(text) - begin) + 1):
            known = scores.get(text[begin : begin + size])
            if known is not None:
                total, ids = best[len(text) - begin - size]
                found.append((total + known[0], [known[1], *ids]))
        best.append(max(reversed(found), key=lambda row: row[0]))
    return best[-1][1]
