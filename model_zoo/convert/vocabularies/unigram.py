"""Unigram vocabularies from a tokenizer.json, as of XLM-RoBERTa."""

import base64
import binascii
from typing import Any

from gguf import GGUFValueType

from model_zoo.convert.vocabularies.files import TokenizerFiles, listed, parts
from model_zoo.convert.vocabularies.sentencepiece import prefixes
from model_zoo.convert.vocabularies.tokens import TokenTable
from model_zoo.convert.writer import MetadataField
from model_zoo.tokenizers.vocabulary import TokenType
from runtime.errors import UnsupportedModelError


def unigram(files: TokenizerFiles) -> tuple[TokenTable, dict[str, Any]]:
    """The table with the scores of the vocabulary, and the normaliser's table of characters."""
    unknown, table = files.model.get("unk_id"), TokenTable(scores=[])
    for id, row in enumerate(listed(files.model.get("vocab"))):
        if not _is_token(row):
            raise files.error("tokenizer.json", f"has {str(row)[:40]!r} as a token with its score")
        kind = TokenType.UNKNOWN if id == unknown else TokenType.NORMAL
        table.put(files.checked_id("tokenizer.json", id), row[0], kind, float(row[1]))
    table.add(files.added_tokens())
    keys: dict[str, Any] = {"model": "t5", "add_space_prefix": prefixes(files)}
    charsmap = _characters(files)
    if charsmap:
        kinds = GGUFValueType.ARRAY, GGUFValueType.UINT8
        keys["precompiled_charsmap"] = MetadataField(list(charsmap), *kinds)
    return table, keys


def _is_token(row: Any) -> bool:
    """Whether a row of the vocabulary is a text with its score."""
    if not isinstance(row, list) or len(row) != 2:
        return False
    return isinstance(row[0], str) and isinstance(row[1], int | float)


def _characters(files: TokenizerFiles) -> bytes:
    """The normaliser's table; empty if it has none. White space is always collapsed."""
    found = b""
    for step in parts(files.json.get("normalizer"), "normalizers"):
        if step.get("type") == "Precompiled":
            try:
                found = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise files.error("tokenizer.json", "has a damaged normaliser") from error
        elif step.get("type") != "Strip" and step.get("content") != " ":
            raise UnsupportedModelError(
                f"{files.folder / 'tokenizer.json'}: its normalizer has a step "
                f"{str(step.get('type'))[:40]}, which files cannot express."
            )
    return found
