"""Token bytes to valid text; holds back partial UTF-8 and possible stop strings."""

import codecs
from collections import deque
from collections.abc import Sequence

from runtime.engine.request import Sampled


class TextStream:
    """The text of one answer, released as soon as it cannot change.

    Bytes are held back while they are an incomplete UTF-8 sequence or the beginning of a stop
    string. Bytes that can never become valid UTF-8 turn into U+FFFD; an incomplete sequence at
    the very end is dropped. `keep_match`: the text ends after a stop string instead of before it.
    """

    def __init__(self, stop_strings: Sequence[str] = (), *, keep_match: bool = False) -> None:
        self.matched: str | None = None  # the stop string that has ended the answer
        self._keep_match = keep_match
        self._stops = tuple(stop.encode() for stop in stop_strings)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""
        self._released = 0  # bytes passed to the decoder so far
        self._pieces: deque[tuple[int, int, Sampled]] = deque()  # begin, end in bytes
        self._resumed_text = ""
        self._skip = 0  # characters that the client already has
        self._holds = bool(self._stops)  # whether any text may be held back or skipped

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    def resume(self, sampled: bytes, characters: int) -> None:
        """Continue an answer with the bytes `sampled`; the client has `characters` of its text.

        Called before `push`; the tokens of `sampled` are not returned again.
        """
        assert not self._released and not self._held and not self._pieces
        self._held = sampled
        self._resumed_text, _ = self._release(len(sampled) - self._possible_stop())
        self._skip = characters
        self._holds = True

    def push(
        self, piece: bytes, sampled: Sampled, *, may_stop: bool = True
    ) -> tuple[str, tuple[Sampled, ...]]:
        """Append a token; returns the text that is now certain, and its tokens.

        When the token completes a stop string and `may_stop` is set, that ends the text.
        """
        if not self._holds and not self._pieces and piece.isascii():
            self._released += len(piece)
            return piece.decode(), (sampled,)
        assert not self.stopped
        begin = self._released + len(self._held)
        self._pieces.append((begin, begin + len(piece), sampled))
        self._held += piece
        cut = self._match(len(piece)) if may_stop else None
        if cut is not None:
            self._drop_pieces_from(self._released + cut)
            self._held = self._held[:cut]
            return self.flush()
        return self._release(len(self._held) - self._possible_stop())

    def flush(self) -> tuple[str, tuple[Sampled, ...]]:
        """End the answer; returns the held-back bytes that are valid text."""
        text, done = self._release(len(self._held))
        rest = tuple(sampled for _, _, sampled in self._pieces)
        self._pieces.clear()
        return text, done + rest

    def _release(self, count: int) -> tuple[str, tuple[Sampled, ...]]:
        text = self._resumed_text + self._decoder.decode(self._held[:count])
        self._resumed_text = ""
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        self._held = self._held[count:]
        self._released += count
        certain = self._released - len(self._decoder.getstate()[0])
        done = []
        while self._pieces and self._pieces[0][1] <= certain:
            done.append(self._pieces.popleft()[2])
        return text[skipped:], tuple(done)

    def _match(self, new: int) -> int | None:
        """The end of the text at a stop string that ends within the last `new` bytes, which becomes
        `matched`; None without."""
        before = len(self._held) - new
        begins = ((stop, max(0, before - len(stop) + 1)) for stop in self._stops)
        found = ((self._held.find(stop, begin), stop) for stop, begin in begins)
        places = [(at, stop) for at, stop in found if at >= 0]
        if not places:
            return None
        begin, stop = min(places, key=lambda place: place[0])
        self.matched = stop.decode()
        return begin + len(stop) if self._keep_match else begin

    def _possible_stop(self) -> int:
        """Length of the longest suffix of the held bytes that is a prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _drop_pieces_from(self, offset: int) -> None:
        while self._pieces and self._pieces[-1][0] >= offset:
            self._pieces.pop()
