"""Where the last tokens of a sequence have occurred before in it, and what followed."""

from array import array

MIN_MATCH = 3  # tokens
LONGEST_MATCH = 32  # tokens; longer matches count as equally long
CANDIDATES = 8  # places that one search compares
MOST_PLACES = 2**16  # older places are not searched


class NGramIndex:
    """The places of all runs of MIN_MATCH tokens; a place is the end of its run.

    A hash table has the latest place of each hash, and a ring has the previous place with the same
    hash, as in DEFLATE's matcher: constant time per token and per search, and 8 bytes per place.
    `most_tokens`: the maximum length of `tokens`.
    """

    def __init__(self, tokens: list[int], *, most_tokens: int) -> None:
        size = 1 << (min(most_tokens, MOST_PLACES) - 1).bit_length()
        self._tokens, self._mask = tokens, size - 1
        self._latest = array("i", [-1]) * size
        self._earlier = array("i", [-1]) * size
        self._indexed = MIN_MATCH  # the next place to add

    def extend(self, most: int) -> int:
        """Add up to `most` new places; returns the number of those added."""
        tokens, mask, latest, earlier = self._tokens, self._mask, self._latest, self._earlier
        begin = max(self._indexed, len(tokens) - mask)
        end = max(begin, min(len(tokens), begin + most))
        for place in range(begin, end):
            cell = _hash(tokens, place) & mask
            earlier[place & mask], latest[cell] = latest[cell], place
        self._indexed = end
        return end - begin

    def continuation(self, most: int) -> tuple[int, ...]:
        """The `most` tokens after the longest earlier occurrence of the last tokens; after the
        latest one if several are equally long. () if there is none, or if places are missing."""
        tokens, end, found, longest = self._tokens, len(self._tokens), 0, MIN_MATCH - 1
        if not MIN_MATCH <= end == self._indexed:
            return ()
        place = self._latest[_hash(tokens, end) & self._mask]
        for _ in range(CANDIDATES):
            if place < max(MIN_MATCH, end - self._mask):  # earlier places are overwritten
                break
            length = _common(tokens, place, end)
            if length > longest:
                found, longest = place, length
            if longest == LONGEST_MATCH:
                break
            place = self._earlier[place & self._mask]
        # Where the continuation reaches the end of the tokens, it repeats from its first token.
        period = end - found
        return tuple(tokens[found + n % period] for n in range(most)) if found else ()


def _hash(tokens: list[int], place: int) -> int:
    first, second, third = tokens[place - MIN_MATCH : place]
    return (((first * 0x9E3779B1 + second) * 0x85EBCA6B + third) * 0xC2B2AE35 >> 15) & 0xFFFFFFFF


def _common(tokens: list[int], place: int, end: int) -> int:
    """How many tokens before `place` equal those before `end`, up to LONGEST_MATCH."""
    length, most = 0, min(place, LONGEST_MATCH)
    while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
