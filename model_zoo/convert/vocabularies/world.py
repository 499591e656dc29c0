"""The vocabulary of RWKV's World models: a text file with a line for each token."""

import ast
from typing import Any

from model_zoo.convert.configuration import read_text
from model_zoo.convert.vocabularies.files import MAX_TOKENS, TokenizerFiles
from model_zoo.convert.vocabularies.tokens import TokenTable
from model_zoo.tokenizers.vocabulary import TokenType
from model_zoo.tokenizers.world import escaped

# Token 0, which begins and ends documents. The token of a paragraph break ends an answer.
_DOCUMENT, _ANSWER_END = "<s>", b"\n\n"


def world(files: TokenizerFiles) -> tuple[TokenTable, dict[str, Any]]:
    """The table, and the roles of tokens; checkpoints state others, which are those of Llama."""
    assert files.world_lines is not None
    table = TokenTable()
    table.put(0, _DOCUMENT, TokenType.CONTROL)
    roles = {"bos_token_id": 0, "eos_token_id": 0}
    for line in filter(str.strip, read_text(files.world_lines).split("\n")):
        id, piece = _row(files, line)
        table.put(id, escaped(piece), TokenType.NORMAL)
        if piece == _ANSWER_END:
            roles["eot_token_id"] = id
    return table, {"model": "rwkv", "add_bos_token": False, **roles}


def _row(files: TokenizerFiles, line: str) -> tuple[int, bytes]:
    """A token's id and bytes, of a line with the id, a literal and the number of bytes."""
    id, _, rest = line.partition(" ")
    literal, _, length = rest.rpartition(" ")
    try:
        piece, number = ast.literal_eval(literal), int(id)
        piece = piece.encode() if isinstance(piece, str) else piece
        sound = isinstance(piece, bytes) and len(piece) == int(length)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        sound = False
    if not sound or not 0 < number < MAX_TOKENS:
        raise files.error(files.WORLD, f"has {line[:40]!r} as a token")
    return number, piece
