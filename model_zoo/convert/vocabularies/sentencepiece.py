"""SentencePiece-BPE, from its model file or from the merges of a tokenizer.json."""

import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

from model_zoo.convert.vocabularies.byte_level import merges, vocabulary
from model_zoo.convert.vocabularies.files import TokenizerFiles, parts
from model_zoo.convert.vocabularies.tokens import TokenTable
from model_zoo.tokenizers.marked_space import SPACE
from model_zoo.tokenizers.vocabulary import TokenType
from runtime.errors import UnsupportedModelError

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def from_model_file(files: TokenizerFiles) -> tuple[TokenTable, dict[str, Any]]:
    """The table with the scores of tokenizer.model, and the added tokens."""
    model = ModelProto()
    assert files.sentencepiece is not None
    try:
        model.ParseFromString(files.sentencepiece.read_bytes())
    except (DecodeError, OSError) as error:
        raise files.error("tokenizer.model", f"is not a SentencePiece model: {error}") from error
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise UnsupportedModelError(
            f"{files.sentencepiece}: is a SentencePiece model of another kind than BPE, which "
            "cannot be converted."
        )
    table = TokenTable(scores=[])
    for id, piece in enumerate(model.pieces):
        table.put(id, piece.piece, TokenType(piece.type), piece.score)
    _add(table, files)
    prefix = _model_prefixes(files, model.normalizer_spec.add_dummy_prefix)
    return table, {"model": "llama", "add_space_prefix": prefix}


def _model_prefixes(files: TokenizerFiles, default: bool) -> bool:
    """Whether texts get a prefix space: by the tokenizer.json beside the model file, or else by the
    settings, or else as the model file states (`default`)."""
    if files.model:
        return prefixes(files)
    stated = files.settings.get("add_prefix_space")
    return stated if isinstance(stated, bool) else default


def from_merges(files: TokenizerFiles) -> tuple[TokenTable, dict[str, Any]]:
    """The table from a converted tokenizer.json: the earlier a token merges, the higher its score.

    Refused if the vocabulary allows merges that are not listed, because scores cannot exclude them.
    """
    pairs = [tuple(merge.split(" ", 1)) for merge in merges(files)]
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    _refuse_others(files, vocabulary(files), set(pairs), ranks)
    table = _ordinary(files, TokenTable(scores=[]))
    table.scores = [-float(ranks.get(text, len(pairs))) for text in table.texts]
    _add(table, files)
    return table, {"model": "llama", "add_space_prefix": prefixes(files)}


def from_ranked_merges(files: TokenizerFiles) -> tuple[TokenTable, dict[str, Any]]:
    """The table of Gemma 4's kind, whose GGUF files contain the merges."""
    table = _ordinary(files, TokenTable())
    table.add(files.added_tokens())
    return table, {"model": "gemma4", "merges": merges(files), "add_space_prefix": False}


def _ordinary(files: TokenizerFiles, table: TokenTable) -> TokenTable:
    """The table with the tokens of the vocabulary: ordinary tokens, bytes and the unknown token."""
    unknown = files.model.get("unk_token") or files.role_text("unk_token")
    for text, id in vocabulary(files).items():
        kind = TokenType.BYTE if _BYTE.fullmatch(text) else TokenType.NORMAL
        table.put(id, text, TokenType.UNKNOWN if text == unknown else kind)
    return table


def _add(table: TokenTable, files: TokenizerFiles) -> None:
    """Adds the added tokens; user-defined ones have plain spaces."""
    table.add(files.added_tokens())
    for id, kind in enumerate(table.types):
        if kind == TokenType.USER_DEFINED:
            table.texts[id] = table.texts[id].replace(SPACE, " ")


def _refuse_others(
    files: TokenizerFiles,
    ids: Mapping[str, int],
    pairs: set[tuple[str, ...]],
    ranks: Mapping[str, int],
) -> None:
    for text in ranks:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids and (left, right) not in pairs:
                raise UnsupportedModelError(
                    f"{files.folder / 'tokenizer.json'}: its merges are not those of a "
                    f"SentencePiece model (they lack {left!r} with {right!r}); put the "
                    "tokenizer.model beside it."
                )


def prefixes(files: TokenizerFiles) -> bool:
    """Whether texts get a prefix space."""
    normalizers = parts(files.json.get("normalizer"), "normalizers")
    splitters = parts(files.json.get("pre_tokenizer"), "pretokenizers")
    return any(step.get("type") == "Prepend" for step in normalizers) or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in splitters
    )
