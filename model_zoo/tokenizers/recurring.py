"""Ids of pieces of text that come again and again, such as words: looked up instead of encoded."""

from collections.abc import Callable, Sequence
from re import Pattern

# Shorter texts are encoded at once.
LONG = 256
# Longer pieces seldom come again.
MAX_PIECE = 32
MAX_PIECES = 1 << 16


class RecurringPieces:
    """Encodes text piece by piece, where that is the same as encoding it whole.

    `cuts` matches the empty text between two pieces that have nothing to do with each other;
    `encode` gives the ids of each of several texts. Any number of threads may encode.
    """

    def __init__(
        self, cuts: Pattern[str], encode: Callable[[list[str]], Sequence[Sequence[int]]]
    ) -> None:
        self._cuts = cuts
        self._encode = encode
        self._known: dict[str, Sequence[int]] = {}

    def __call__(self, text: str) -> list[int]:
        if len(text) < LONG:
            return list(self._encode([text])[0])
        pieces = self._cuts.split(text)
        known = self._known  # entries are added to it and never taken out
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        fresh = dict(zip(missing, self._encode(missing), strict=True)) if missing else {}
        ids: list[int] = []
        for piece in pieces:
            found = known.get(piece)
            ids += fresh[piece] if found is None else found
        self._remember(fresh)
        return ids

    def _remember(self, fresh: dict[str, Sequence[int]]) -> None:
        """When there are too many, it begins anew: what recurs is soon there again."""
        kept = {piece: ids for piece, ids in fresh.items() if len(piece) <= MAX_PIECE}
        if len(self._known) + len(kept) > MAX_PIECES:
            self._known = dict(list(kept.items())[:MAX_PIECES])
        else:
            self._known.update(kept)
