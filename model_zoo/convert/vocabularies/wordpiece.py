"""WordPiece vocabularies: checkpoints mark continuing pieces by ##, GGUF files first pieces by
▁."""

from collections.abc import Mapping
from typing import Any

from model_zoo.convert.vocabularies.byte_level import vocabulary
from model_zoo.convert.vocabularies.files import TokenizerFiles, parts
from model_zoo.convert.vocabularies.tokens import TokenTable
from model_zoo.tokenizers.marked_space import SPACE
from model_zoo.tokenizers.vocabulary import TokenType
from runtime.errors import UnsupportedModelError


def wordpiece(files: TokenizerFiles) -> tuple[TokenTable, dict[str, Any]]:
    prefix = files.model.get("continuing_subword_prefix", "##")
    if prefix != "##":
        raise UnsupportedModelError(
            f"{files.folder / 'tokenizer.json'}: marks continuing pieces by {prefix!r}; only ## "
            "can be converted."
        )
    unknown = files.model.get("unk_token")
    added = files.added_tokens()
    table = TokenTable()
    for text, id in vocabulary(files).items():
        if id in added or text == unknown:
            kind = TokenType.UNKNOWN if text == unknown else TokenType.CONTROL
            table.put(id, text, kind)
        else:
            table.put(id, text[2:] if text.startswith("##") else SPACE + text, TokenType.NORMAL)
    table.add(added)
    lowercase = _lowercase(files)
    # One separator stands between the texts of a pair: llama.cpp would add a second one.
    return table, {"model": "bert", "normalizer.lowercase": lowercase, "add_sep_token": False}


def _lowercase(files: TokenizerFiles) -> bool:
    for step in parts(files.json.get("normalizer"), "normalizers"):
        if step.get("type") == "BertNormalizer":
            return _plain_normalizer(files, step)
    return bool(files.settings.get("do_lower_case", True))


def _plain_normalizer(files: TokenizerFiles, step: Mapping[str, Any]) -> bool:
    """Whether the normaliser lowercases; files cannot express its other settings."""
    lowercase = bool(step.get("lowercase", True))
    usual = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": lowercase}
    for name, value in usual.items():
        if step.get(name) not in (None, value):
            raise UnsupportedModelError(
                f"{files.folder / 'tokenizer.json'}: its normalizer has `{name}` "
                f"{str(step[name])[:40]}, which files cannot express."
            )
    return lowercase
