"""The vocabularies of PLaMo 2 and 3: a file with a line for each token."""

import json
from typing import Any

from model_zoo.convert.configuration import read_text
from model_zoo.convert.vocabularies.files import MAX_TOKENS, TokenizerFiles
from model_zoo.convert.vocabularies.tokens import TokenTable
from model_zoo.tokenizers.vocabulary import TokenType

_TYPES = {
    "UNKNOWN": TokenType.UNKNOWN,
    "CONTROL": TokenType.CONTROL,
    "BYTE": TokenType.BYTE,
}


def plamo(files: TokenizerFiles) -> tuple[TokenTable, dict[str, Any]]:
    """The table with the scores of tokenizer.jsonl, and the added tokens."""
    assert files.token_lines is not None
    table = TokenTable(scores=[])
    lines = filter(str.strip, read_text(files.token_lines).split("\n"))
    for id, line in enumerate(lines):
        text, score, kind = _row(files, line)
        special = text.startswith("<|plamo:") and text.endswith("|>")
        usual = TokenType.CONTROL if special else TokenType.NORMAL
        table.put(id, text, _TYPES.get(kind, usual), score)
    if not table.texts or len(table.texts) > MAX_TOKENS:
        raise files.error("tokenizer.jsonl", f"has {len(table.texts):,} tokens")
    table.add(files.added_tokens())
    return table, {"model": "plamo2", "pre": "default", "add_space_prefix": False}


def _row(files: TokenizerFiles, line: str) -> tuple[str, float, str]:
    """A token's text, score and type."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    match row:
        case [str(text), int(score) | float(score), *others]:
            return text, float(score), str(others[0]) if others else "NORMAL"
    raise files.error("tokenizer.jsonl", f"has {line[:40]!r} as a token with its score")
