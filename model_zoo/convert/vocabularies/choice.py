"""Determines a checkpoint's kind of tokenizer and collects its metadata."""

from typing import Any

from model_zoo.convert.vocabularies.byte_level import byte_level, is_byte_level
from model_zoo.convert.vocabularies.files import TokenizerFiles
from model_zoo.convert.vocabularies.plamo import plamo
from model_zoo.convert.vocabularies.roles import role_keys
from model_zoo.convert.vocabularies.sentencepiece import (
    from_merges,
    from_model_file,
    from_ranked_merges,
)
from model_zoo.convert.vocabularies.templates import template_keys
from model_zoo.convert.vocabularies.tokens import TokenTable
from model_zoo.convert.vocabularies.unigram import unigram
from model_zoo.convert.vocabularies.wordpiece import wordpiece
from model_zoo.convert.vocabularies.world import world
from model_zoo.families import only_embeds
from runtime.errors import UnsupportedModelError


def tokenizer_keys(
    files: TokenizerFiles, *, architecture: str, rows: int, kind: str | None
) -> dict[str, Any]:
    """Full key names and values. `rows`: rows of the embedding, the number of tokens.

    kind: `tokenizer.ggml.model`, if the architecture determines it. Errors name the file and the
    part of it that cannot be converted.
    """
    table, own = _table(files, architecture, kind)
    table.cut(rows)
    table.fill(rows)
    own |= {"tokens": table.texts, "token_type": table.types}
    if table.scores is not None:
        own["scores"] = table.scores
    if files.world_lines is None:
        own |= role_keys(files, table.texts)
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()} | template_keys(files)


def _table(
    files: TokenizerFiles, architecture: str, kind: str | None
) -> tuple[TokenTable, dict[str, Any]]:
    model = files.model.get("type")
    if files.token_lines is not None:
        return plamo(files)
    if files.world_lines is not None:
        return world(files)
    if model == "BPE" and is_byte_level(files):
        return byte_level(files, architecture)
    if model == "BPE" and kind == "gemma4":
        return from_ranked_merges(files)
    if model == "Unigram" and only_embeds(architecture):
        return unigram(files)
    if model in ("BPE", "Unigram", None) and files.sentencepiece is not None:
        return from_model_file(files)
    if model == "BPE":
        return from_merges(files)
    if model == "WordPiece":
        return wordpiece(files)
    if model is None:
        raise files.error("tokenizer.json", "is missing, as is tokenizer.model")
    raise UnsupportedModelError(
        f"{files.folder / 'tokenizer.json'}: a tokenizer of the kind {model} cannot be converted; "
        "BPE, SentencePiece-BPE and WordPiece can."
    )
