"""A small vocabulary of RWKV's World models, as lines of its file, and the authors' algorithm."""

PIECES: tuple[bytes, ...] = (
    *(bytes([value]) for value in range(256)),
    *(b"\n\n", b"ab", b"abcab", b" the", b"\\n", b"'\"", b"\xe6\x9d", "東".encode(), b"\x9d\xb1"),
    *(b"User", b": ", b"Assistant:"),
)
TEXTS = (
    "ab abc abcab abcabc",
    "東京 \u6771\u6772 👍",
    "\n \n\n \n\n\n \\n '\" \t\r\x00",
    "User: the\n\nAssistant:",
    "",
)


def lines() -> str:
    """Literals of texts where the bytes are UTF-8, as in the published file."""
    rows = []
    for id, piece in enumerate(PIECES, start=1):
        try:
            literal = repr(piece.decode())
        except UnicodeDecodeError:
            literal = repr(piece)
        rows.append(f"{id} {literal} {len(piece)}\n")
    return "".join(rows)


def authors_ids(text: str) -> list[int]:
    data, ids = text.encode(), []
    while data:
        found = max((piece for piece in PIECES if data.startswith(piece)), key=len)
        ids.append(1 + PIECES.index(found))
        data = data[len(found) :]
    return ids
