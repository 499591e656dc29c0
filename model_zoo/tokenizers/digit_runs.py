"""Cuts long runs of digits, for pre-tokenizers that group digits from the right.

Their expressions look ahead to the end of the run from every digit, which takes quadratic time.
"""

import re

from tokenizers.pre_tokenizers import PreTokenizer

# A multiple of 3: runs of more digits are cut into pieces of so many.
_PIECE = 30
_LONG_RUN = re.compile(rf"\d{{{_PIECE + 1},}}")


class DigitRuns:
    """Cuts text at places where `native` splits it, within long runs of digits only."""

    def __init__(self, native: PreTokenizer) -> None:
        self._native = native

    def pieces(self, text: str) -> list[str]:
        cuts = [0]
        for run in _LONG_RUN.finditer(text):
            cuts += range(run.start() + self._first_group(run), run.end(), _PIECE)
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]

    def _first_group(self, run: re.Match[str]) -> int:
        """The number of digits in the first group, as in a run that is a multiple of 3 shorter.

        The character after a run decides whether its groups begin at the right.
        """
        short = "1" * (3 + (run.end() - run.start()) % 3) + run.string[run.end() : run.end() + 1]
        _, (begin, end) = self._native.pre_tokenize_str(short)[0]
        return int(end - begin)
