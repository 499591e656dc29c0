"""Damaging model files where the computation depends on them: sizes, tensors' places, weights."""

import struct
from random import Random

from tests.fuzz.mutations import _changed, _overwrite, mutated
from tests.fuzz.pieces import Pieces, take_apart
from tests.unit.model_zoo.gguf_bytes import STRING

# The types of numbers in a file, as `struct` spells them.
_FORMATS = dict(zip((*range(8), *range(10, 13)), "BbHhIif?Qqd", strict=True))
# Extremes of halves and of floats, as scales of blocks or as weights.
_WORDS = (b"\0\x7c", b"\0\xfc", b"\xff\x7f", b"\xff\x7b", b"\1\0", b"\xff\xff\x7f\x7f", b"\xff")


def damaged(data: bytes, random: Random) -> bytes:
    """Another file, one or two steps away, of which many still load."""
    for _ in range(random.choice((1, 1, 2))):
        pieces = take_apart(data)
        if pieces is None or random.random() < 0.1:
            data = mutated(data, random)
        elif random.random() < 0.4:
            data = _with_another_size(pieces, random)
        elif random.random() < 0.25:
            pieces.infos = _overwrite(bytearray(pieces.infos), random)
            data = pieces.bytes()
        else:
            pieces.data = _with_other_weights(bytearray(pieces.data), random)
            data = pieces.bytes()
    return data


def _with_another_size(pieces: Pieces, random: Random) -> bytes:
    plain = [key for key in pieces.keys if not key.name.startswith((b"tokenizer.", b"general."))]
    key = random.choice(plain or pieces.keys)
    if key.items:
        at = random.randrange(len(key.items))
        key.items[at] = _near(key.item_kind, key.items[at], random)
    elif key.kind != STRING and key.items is None:
        key.value = _near(key.kind, key.value, random)
    elif random.random() < 0.5:
        pieces.keys.remove(key)
    return pieces.bytes()


def _near(kind: int, value: bytes, random: Random) -> bytes:
    """What a size may be mistaken for: its half, its double, its neighbours; else anything."""
    code = _FORMATS.get(kind)
    if code is None or random.random() < 0.3:
        return _changed(kind, value, random)
    (number,) = struct.unpack(f"<{code}", value)
    near = (number + 1, number - 1, number * 2, number // 2, number * 3, 0, 1)
    try:
        return struct.pack(f"<{code}", random.choice(near))
    except struct.error:  # below nought, above the largest
        return _changed(kind, value, random)


def _with_other_weights(data: bytearray, random: Random) -> bytes:
    """Mostly other finite numbers: with one that is not finite a model computes nothing more."""
    for _ in range(random.choice((1, 10, 100))):
        word = random.choice(_WORDS) if random.random() < 0.02 else random.randbytes(1)
        at = 2 * random.randrange(len(data) // 2 + 1)
        data[at : at + len(word)] = word
    return bytes(data)
