"""A cache of the ids of recurring pieces of text, such as words."""

from collections.abc import Callable, Sequence
from re import Pattern

# Shorter texts are encoded without the cache.
LONG = 256
# Longer pieces rarely recur.
MAX_PIECE = 32
MAX_PIECES = 1 << 16


class RecurringPieces:
    """Encodes text piece by piece, with the same result as encoding it whole.

    `cuts` matches the empty text at places that no token spans; texts are cut there. `encode`
    returns the ids of each of several texts. Thread-safe.
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
        known = self._known  # entries are added but never removed
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        fresh = dict(zip(missing, self._encode(missing), strict=True)) if missing else {}
        ids: list[int] = []
        for piece in pieces:
            found = known.get(piece)
            ids += fresh[piece] if found is None else found
        self._remember(fresh)
        return ids

    def _remember(self, fresh: dict[str, Sequence[int]]) -> None:
        """Adds entries; replaces a full cache by an empty one, which soon has the recurring pieces
        again."""
        kept = {piece: ids for piece, ids in fresh.items() if len(piece) <= MAX_PIECE}
        if len(self._known) + len(kept) > MAX_PIECES:
            self._known = dict(list(kept.items())[:MAX_PIECES])
        else:
            self._known.update(kept)
