"""The tokens that contain a sequence breaker."""

from types import SimpleNamespace

import numpy as np

from serve_app.replica.sampling_words import SequenceBreakers

TOKENS = [b"", b"a", b":\n", b"\xe2\x80", b"b: c", *[b"x"] * 30, b'"', b"*"]


def test_tokens_are_found_by_the_characters_within_them():
    tokenizer = SimpleNamespace(vocab_size=len(TOKENS), token_bytes=TOKENS.__getitem__)
    breakers = SequenceBreakers(tokenizer)
    for given, found in (((), []), ((":",), [2, 4]), (("\n", '"', "*"), [2, 35, 36])):
        words = np.frombuffer(breakers.words(given), "<i4")
        assert len(words) == 2
        marked = [n for n in range(64) if words[n // 32] >> (n % 32) & 1]
        assert marked == found
