"""Random mutations of model files: bytes anywhere, or one value of an otherwise sound file."""

import struct
from collections.abc import Callable
from random import Random

from tests.fuzz.parsed_file import WIDTHS, Key, ParsedFile, parse
from tests.fuzz.token_families import add_tokens
from tests.unit.model_zoo.gguf.gguf_bytes import ARRAY, STRING, text, u32, u64

_NUMBERS = (0, 1, 2, 3, 7, 8, 9, 31, 32, 255, 256, 65_535, 1 << 16, 1 << 20, 1 << 30, (1 << 30) + 1)
_EDGES = (*_NUMBERS, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, -1, -2)
_FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e38, float("nan"), float("inf"), float("-inf"))
# Values for text keys: names that the code compares with, and texts that could stall or crash it.
_TEXTS = (
    *(
        "",
        "\0",
        "gpt2",
        "llama",
        "bert",
        "t5",
        "gemma4",
        "plamo2",
        "rwkv",
        "default",
        "qwen2",
        "refact",
    ),
    *("clip", "mmproj", "<s>", "<|im_end|>", "<0x41>", "<0xZZ>", "\u2581", "a b c", " ", "ÿ" * 300),
    *("(a+)+$", "(?:x|x)*y", "[", r"(?<n>a)\k<n>", "\ud7ff\ufdd0\U0010ffff"),
)
_TEMPLATES = (
    "{{ messages }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ tools | tojson(indent=4) }}{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{% for c in m.tool_calls %}<{{ c.function.name }}>{% endfor %}"
    "{% for p in m.content %}{{ p.text or p.type == 'image' }}{% endfor %}{% endfor %}",
    "{% for t in tools %}{% for u in tools %}{{ t | pprint ~ u | urlize }}{% endfor %}{% endfor %}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'x' * 99999999 * 99999999 }}",
    "{{ 9**9**9**9 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
    "{{ " + "-" * 3000 + "1 }}",
    "{% if 1 %}" * 120 + "{% endif %}" * 120,
    "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "{{ [" + "1," * 2000 + "]|map('string')|join('x')|replace('', 'y'*999) }}",
    "{{ 1" + "0" * 5000 + " }}",
    "{{ ''.__class__ }}{% include 'x' %}{% import 'y' as z %}",
    "{{ messages|batch(10**8, 'x')|list }}{{ messages|slice(10**8)|list }}",
    "{{ '%s'|format('x')|indent(10**9) }}{{ 'x'.zfill(10**9) }}{{ 'x'.ljust(10**9) }}",
    "{{ '{:>999999999}'.format('x') }}{{ 'a b'|wordwrap(1, wrapstring='x'*9999999) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ range(100000)|list|tojson(indent=99999) }}",
)
_TEMPLATE_KEY = b"tokenizer.chat_template"


def mutated(data: bytes, random: Random) -> bytes:
    """`data` after one to four random mutations."""
    for _ in range(random.choice((1, 1, 2, 4))):
        file = parse(data) if random.random() < 0.6 else None
        if file is not None and random.random() < 0.05:
            add_tokens(file, random)
            data = file.bytes()
        elif file is not None and file.keys:
            data = _with_one_changed_key(file, random)
        else:
            data = random.choice(_BYTE_CHANGES)(bytearray(data), random)
    return data


def _with_one_changed_key(file: ParsedFile, random: Random) -> bytes:
    tokenizer = [key for key in file.keys if key.name.startswith(b"tokenizer.")]
    key = random.choice(tokenizer if tokenizer and random.random() < 0.6 else file.keys)
    choice = random.randrange(9)
    if choice == 0:
        file.keys.remove(key)
    elif choice == 1:
        key.name = random.choice(file.keys).name
    elif choice == 2:
        key.items, key.kind, key.value = None, STRING, text(_chosen(key.name, random))
    elif choice == 3:
        key.items = None
        key.kind = random.choice(list(WIDTHS))
        key.value = _number(key.kind, random)
    elif choice == 4 and key.items is None:
        key.items, key.item_kind, key.kind = [key.value] * random.choice((0, 1, 2)), key.kind, ARRAY
    elif key.items:
        _change_items(key, random)
    else:
        key.value = changed_value(key.kind, key.value, random, key.name)
    return file.bytes()


def _chosen(name: bytes, random: Random) -> str:
    return random.choice(_TEMPLATES if name.startswith(_TEMPLATE_KEY) else _TEXTS)


def _change_items(key: Key, random: Random) -> None:
    items = key.items
    assert items
    choice, at = random.randrange(5), random.randrange(len(items))
    if choice == 0:
        del items[at : at + random.randrange(1, 4)]
    elif choice == 1:
        items.insert(at, random.choice(items))
    elif choice == 2:
        items[at] = changed_value(key.item_kind, items[at], random)
    elif choice == 3:
        for i in range(len(items)):
            if random.random() < 0.1:
                items[i] = changed_value(key.item_kind, items[i], random)
    else:
        kind = random.choice([*WIDTHS, STRING])
        key.items = [changed_value(kind, b"", random) for _ in items]
        key.item_kind = kind


def changed_value(kind: int, value: bytes, random: Random, name: bytes = b"") -> bytes:
    if kind != STRING:
        return _number(kind, random) if kind in WIDTHS else value
    body = bytearray(value[8:])
    if not body or random.random() < 0.4:
        return text(_chosen(name, random))
    return text(random.choice(_BYTE_CHANGES)(body, random))


def _number(kind: int, random: Random) -> bytes:
    if kind in (6, 12):
        return struct.pack("<f" if kind == 6 else "<d", random.choice(_FLOATS))
    return u64(random.choice(_EDGES))[: WIDTHS[kind]]


def _truncated(data: bytearray, random: Random) -> bytes:
    return bytes(data[: random.randrange(len(data) + 1)])


def _with_flipped_bits(data: bytearray, random: Random) -> bytes:
    for _ in range(random.randrange(1, 9)):
        if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def overwritten(data: bytearray, random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    value = random.choice((u32, u64))(random.choice(_NUMBERS))
    data[at : at + len(value)] = value
    return bytes(data)


def _with_moved_bytes(data: bytearray, random: Random) -> bytes:
    begin, to = random.randrange(len(data) + 1), random.randrange(len(data) + 1)
    part = data[begin : begin + random.randrange(64)]
    data[to : to + random.choice((0, len(part)))] = part
    return bytes(data)


_BYTE_CHANGES: tuple[Callable[[bytearray, Random], bytes], ...] = (
    _truncated,
    _with_flipped_bits,
    overwritten,
    _with_moved_bytes,
)
