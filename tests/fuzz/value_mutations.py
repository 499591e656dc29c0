"""Mutations of the values that computation depends on: sizes, tensor offsets, weights."""

import struct
from random import Random

from tests.fuzz.mutations import changed_value, mutated, overwritten
from tests.fuzz.parsed_file import ParsedFile, parse
from tests.unit.model_zoo.gguf.gguf_bytes import STRING

# Format characters of `struct` by GGUF value type.
_FORMATS = dict(zip((*range(8), *range(10, 13)), "BbHhIif?Qqd", strict=True))
# Extreme half and single precision numbers, as block scales or weights.
_WORDS = (b"\0\x7c", b"\0\xfc", b"\xff\x7f", b"\xff\x7b", b"\1\0", b"\xff\xff\x7f\x7f", b"\xff")


def with_changed_values(data: bytes, random: Random) -> bytes:
    """`data` after one or two mutations; many of the results still load."""
    for _ in range(random.choice((1, 1, 2))):
        file = parse(data)
        if file is None or random.random() < 0.1:
            data = mutated(data, random)
        elif random.random() < 0.4:
            data = _with_another_size(file, random)
        elif random.random() < 0.25:
            file.infos = overwritten(bytearray(file.infos), random)
            data = file.bytes()
        else:
            file.data = _with_other_weights(bytearray(file.data), random)
            data = file.bytes()
    return data


def _with_another_size(file: ParsedFile, random: Random) -> bytes:
    plain = [key for key in file.keys if not key.name.startswith((b"tokenizer.", b"general."))]
    key = random.choice(plain or file.keys)
    if key.items:
        at = random.randrange(len(key.items))
        key.items[at] = _near(key.item_kind, key.items[at], random)
    elif key.kind != STRING and key.items is None:
        key.value = _near(key.kind, key.value, random)
    elif random.random() < 0.5:
        file.keys.remove(key)
    return file.bytes()


def _near(kind: int, value: bytes, random: Random) -> bytes:
    """A plausible wrong size (half, double, one more or less), or any other value."""
    code = _FORMATS.get(kind)
    if code is None or random.random() < 0.3:
        return changed_value(kind, value, random)
    (number,) = struct.unpack(f"<{code}", value)
    near = (number + 1, number - 1, number * 2, number // 2, number * 3, 0, 1)
    try:
        return struct.pack(f"<{code}", random.choice(near))
    except struct.error:  # out of the type's range
        return changed_value(kind, value, random)


def _with_other_weights(data: bytearray, random: Random) -> bytes:
    """Replaces mostly by finite numbers: one that is not finite hides all further computation."""
    for _ in range(random.choice((1, 10, 100))):
        word = random.choice(_WORDS) if random.random() < 0.02 else random.randbytes(1)
        at = 2 * random.randrange(len(data) // 2 + 1)
        data[at : at + len(word)] = word
    return bytes(data)
