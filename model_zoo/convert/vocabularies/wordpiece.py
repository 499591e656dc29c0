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
    # One separator stands between the texts of a pair: llama.cpp would add a second one.
    return table, {"model": "bert", "add_sep_token": False, **_normalizer_keys(files)}


def _normalizer_keys(files: TokenizerFiles) -> dict[str, bool]:
    """Whether text is lowercased, and if stated, whether accents are stripped."""
    steps = parts(files.json.get("normalizer"), "normalizers")
    step = next((step for step in steps if step.get("type") == "BertNormalizer"), None)
    if step is None:
        settings = files.settings
        lowercase, strips = settings.get("do_lower_case", True), settings.get("strip_accents")
    else:
        _check_usual(files, step)
        lowercase, strips = step.get("lowercase", True), step.get("strip_accents")
    keys = {"normalizer.lowercase": bool(lowercase)}
    return keys if strips is None else keys | {"normalizer.strip_accents": bool(strips)}


def _check_usual(files: TokenizerFiles, step: Mapping[str, Any]) -> None:
    """UnsupportedModelError for settings that files cannot express."""
    for name in ("clean_text", "handle_chinese_chars"):
        if step.get(name) not in (None, True):
            raise UnsupportedModelError(
                f"{files.folder / 'tokenizer.json'}: its normalizer has `{name}` "
                f"{str(step[name])[:40]}, which files cannot express."
            )
