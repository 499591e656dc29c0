"""Text is released as soon as it is certain, without stop strings and partial characters."""

import random

import pytest

from runtime.engine.request import Sampled
from runtime.engine.text_stream import TextStream


def feed(stream: TextStream, pieces: list[bytes]) -> tuple[str, list[int]]:
    """All text and all tokens of it, where token i is piece i; ends at a stop string."""
    text, shown = "", []
    for token, piece in enumerate(pieces):
        more, tokens = stream.push(piece, Sampled(token))
        text += more
        shown += [sampled.token for sampled in tokens]
        if stream.stopped:
            return text, shown
    more, tokens = stream.flush()
    return text + more, shown + [sampled.token for sampled in tokens]


def test_ascii_is_released_at_once() -> None:
    stream = TextStream()
    assert stream.push(b"Hel", Sampled(0)) == ("Hel", (Sampled(0),))
    assert stream.push(b"lo", Sampled(1)) == ("lo", (Sampled(1),))


def test_a_character_split_over_tokens_is_released_whole() -> None:
    stream = TextStream()
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert stream.push(b"caf" + first, Sampled(0)) == ("caf", ())
    assert stream.push(second, Sampled(1)) == ("é", (Sampled(0), Sampled(1)))


def test_a_resumed_answer_may_end_inside_a_character() -> None:
    stream = TextStream()
    stream.resume("Gr\u00fc".encode()[:-1], 2)
    assert stream.push("\u00fc".encode()[-1:], Sampled(7)) == ("\u00fc", (Sampled(7),))
    broken = TextStream()
    broken.resume("Gr\u00fc".encode()[:-1], 2)
    assert broken.push(b"n", Sampled(7)) == ("\ufffdn", (Sampled(7),))


def test_bytes_that_cannot_become_text_are_replaced_and_a_broken_end_is_dropped() -> None:
    assert feed(TextStream(), [b"a\xff", b"b", b"\xf0\x9f"]) == ("a\ufffdb", [0, 1, 2])


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "shown"),
    [
        ([b"one ", b"STOP", b"two"], ["STOP"], "one ", [0]),
        ([b"one S", b"TO", b"P two"], ["STOP"], "one ", [0]),
        ([b"one S", b"TO", b"RE"], ["STOP"], "one STORE", [0, 1, 2]),
        ([b"a", b"b", b"c"], ["bc", "c"], "a", [0]),
        ([b"xaab"], ["aab", "ab"], "x", [0]),
        ([b"aa", b"ab"], ["aab"], "a", [0]),
        ([b"say ", b"h\xc3", b"\xa9 now"], ["hé"], "say ", [0]),
        ([b"no match S"], ["STOP"], "no match S", [0]),
    ],
)
def test_stop_strings(pieces: list[bytes], stops: list[str], text: str, shown: list[int]) -> None:
    stream = TextStream(stops)
    assert feed(stream, pieces) == (text, shown)


def test_the_start_of_a_stop_string_is_held_back() -> None:
    stream = TextStream(["<end>"])
    assert stream.push(b"done <e", Sampled(0)) == ("done ", ())
    assert stream.push(b"gg", Sampled(1)) == ("<egg", (Sampled(0), Sampled(1)))


def test_any_split_into_tokens_gives_the_same_text() -> None:
    r = random.Random(1)
    alphabet = "abé😀 STO"
    for _ in range(500):
        whole = "".join(r.choice(alphabet) for _ in range(r.randint(0, 30)))
        stops = ["".join(r.choice(alphabet) for _ in range(r.randint(1, 3))) for _ in range(2)]
        data = whole.encode()
        cuts = sorted(r.randint(0, len(data)) for _ in range(6))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        text, _ = feed(TextStream(stops), pieces)
        # A stop string that is complete first wins, even where another one begins before it.
        ends = {whole[: whole.find(stop)] for stop in stops if stop in whole}
        assert text in (ends or {whole})
        assert not any(stop in text for stop in stops)


@pytest.mark.parametrize(("keep", "text"), [(False, "one "), (True, "one STOP")])
def test_the_matched_string_is_known_and_may_stay(keep: bool, text: str) -> None:
    stream = TextStream(["never", "STOP"], keep_match=keep)
    found, shown = feed(stream, [b"one ", b"ST", b"OP two", b"three"])
    assert (found, stream.matched) == (text, "STOP")
    assert shown == ([0, 1, 2] if keep else [0])


def test_a_string_that_is_complete_too_early_is_not_held_back() -> None:
    stream = TextStream(["ab"])
    assert stream.push(b"xab", Sampled(0), may_stop=False)[0] == "xab"
    assert (stream.push(b"c", Sampled(1))[0], stream.stopped) == ("c", False)


def test_a_string_that_is_complete_too_early_does_not_stop_and_one_that_ends_later_does() -> None:
    stream = TextStream(["ab"])
    early = [stream.push(piece, Sampled(0), may_stop=False)[0] for piece in (b"xab", b"ya")]
    assert ("".join(early), stream.stopped) == ("xaby", False)
    assert stream.push(b"bz", Sampled(1))[0] == ""
    assert stream.matched == "ab"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_string_that_was_complete_too_early_does_not_stop_while_it_is_held_back(
    resumed: bool,
) -> None:
    stream, text = TextStream(["b", "abc"]), ""
    if resumed:
        stream.resume(b"ab", 0)
    else:
        text = stream.push(b"ab", Sampled(0), may_stop=False)[0]
    text += stream.push(b"x abd", Sampled(1))[0]
    assert (text, stream.matched) == ("abx a", "b")
