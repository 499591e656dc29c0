"""Texts of many scripts, for comparisons of tokenizers."""

import random
import unicodedata

WORDS = (
    *("the", "don't", "WE'LL", "o'clock", "'S", "naïve", "straße", "Ångström", "ﬁne", "ǅungla"),
    *("Привет", "мир", "東京タワー", "我想在", "한국어", "กาแฟ", "नमस्ते", "العربية", "עברית"),
    *("x²", "½", "١٢٣", "12345", "3.14", "0x1F", "...", "!?", "</a>", "{x: [1]}", "//", "_", "`"),
    *("  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\u200b", " \n ", "\n\n\n", "\x00"),
    *("👩‍👩‍👧", "🇨🇭", "🏽", "❤️", "▁", "�"),
)


def random_texts(seed: int, count: int) -> list[str]:
    """Words, digits, spaces, many scripts, emoji sequences and assigned code points at large."""
    random_source = random.Random(seed)
    assigned = [
        chr(code)
        for code in (*range(0x20, 0x3000), *range(0xA000, 0xA700), *range(0x1F300, 0x1F700))
        if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
    ]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(random_source.randrange(1, 30)):
            pool = WORDS if random_source.random() < 0.7 else assigned
            parts.append(random_source.choice(pool))
            parts.append(random_source.choice(("", "", " ")))
        texts.append("".join(parts))
    return texts
