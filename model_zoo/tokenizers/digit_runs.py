"""Cuts long runs of digits, for pre-tokenizers that group digits from the right.

Their expressions look ahead to the end of the run from every digit, which takes quadratic time.
"""

import re

from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Split

# Longer runs of digits are cut into pieces of this length, a multiple of 3.
_PIECE = 30
# Before a run: the last one may be a piece of its own.
_SPACES = re.compile(r"\s[^\S\r\n]")


class DigitRuns:
    """Cuts text at places where `native` splits it: in long runs of digits, and before the last
    space in front of them. `digit`: an expression for the characters that count as digits."""

    def __init__(self, native: PreTokenizer, digit: str) -> None:
        self._native = native
        long_run = Regex(f"{digit}{{{_PIECE + 1},}}")
        self._long_runs = Split(long_run, behavior="removed", invert=True)

    def pieces(self, text: str) -> list[str]:
        cuts = [0]
        for _, (begin, end) in self._long_runs.pre_tokenize_str(text):
            # The character after a run decides how it is split, and the spaces before it: as those
            # of a run that is a multiple of 3 shorter.
            short = "1" * (3 + (end - begin) % 3) + text[end : end + 1]
            if (
                _SPACES.fullmatch(text[max(0, begin - 2) : begin])
                and self._first("  " + short) == 1
            ):
                cuts.append(begin - 1)
            cuts += range(begin + self._first(short), end, _PIECE)
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    def _first(self, text: str) -> int:
        """The number of characters in the first piece."""
        _, (begin, end) = self._native.pre_tokenize_str(text)[0]
        return int(end - begin)
