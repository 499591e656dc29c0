"""Tokens with roles (begin, end, padding, separator, infill, suppressed), and whether tokenizing
adds them."""

from collections.abc import Mapping
from typing import Any

from model_zoo.convert.vocabularies.files import TokenizerFiles, listed, parts
from model_zoo.tokenizers.infill import infill_ids
from model_zoo.tokenizers.vocabulary import END_TEXTS, end_texts

_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # the misspelling is the key's real name
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
# Texts of tokens that end a turn or a message.
_TURN_ENDS = {
    "eot_token_id": (
        "<|eot_id|>",
        "<|im_end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|end|>",
        "<|plamo:op|>",
    ),
    "eom_token_id": ("<|eom_id|>",),
}


def role_keys(files: TokenizerFiles, texts: list[str]) -> dict[str, Any]:
    """The `tokenizer.ggml` keys with token ids; ids beyond the vocabulary are ignored."""
    ids: dict[str, int] = {}
    for id, text in enumerate(texts):
        ids.setdefault(text, id)
    keys: dict[str, Any] = {}
    for role, key in _ROLES.items():
        stated = files.role_text(f"{role}_token")
        token = _stated_id(files, role) if stated is None else ids.get(stated)
        if token is not None and token < len(texts):
            keys[key] = token
    known = end_texts(ids)
    for key, candidates in _TURN_ENDS.items():
        found = [ids[text] for text in candidates if text in known]
        if found:
            keys[key] = found[0]
    lists = {"eos_token_ids": _end_ids(files), "suppress_tokens": _suppressed_ids(files)}
    for key, stated_ids in lists.items():
        inside = [id for id in stated_ids if id < len(texts)]
        if inside:
            keys[key] = inside
    keys = _with_added_tokens(files, ids, keys)
    keys |= _further_ends(texts, keys) | infill_ids(ids)
    return keys | _adding_flags(files, ids, keys)


def _with_added_tokens(
    files: TokenizerFiles, ids: Mapping[str, int], keys: Mapping[str, Any]
) -> dict[str, Any]:
    """`keys` with the post-processor's tokens as BOS and EOS.

    In embedding models they may differ from the tokens of a turn.
    """
    framed = dict(keys)
    first, last = _added_tokens(files, ids)
    if first is not None and first != keys.get("bos_token_id", keys.get("cls_token_id")):
        framed["bos_token_id"] = first
    eos = keys.get("eos_token_id", keys.get("seperator_token_id"))
    if last is not None and last != eos:
        ends = [*keys.get("eos_token_ids", []), eos, last]
        framed["eos_token_ids"] = list(dict.fromkeys(id for id in ends if id is not None))
        framed["eos_token_id"] = last
    return framed


def _further_ends(texts: list[str], keys: Mapping[str, Any]) -> dict[str, int]:
    """End tokens other than EOS under the keys of ends of turns that are still free.

    llama.cpp does not read `eos_token_ids`. Tokens that it recognises by their texts come last.
    """
    named = {keys.get(key) for key in ("eos_token_id", *_TURN_ENDS)}
    others = [id for id in keys.get("eos_token_ids", []) if id not in named]
    others.sort(key=lambda id: texts[id] in END_TEXTS)
    return dict(zip((key for key in _TURN_ENDS if key not in keys), others, strict=False))


def _stated_id(files: TokenizerFiles, role: str) -> int | None:
    for value in (files.config.get(f"{role}_token_id"), files.generation.get(f"{role}_token_id")):
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int) and value >= 0:
            return value
    return None


def _end_ids(files: TokenizerFiles) -> list[int]:
    """All end tokens of the generation settings, or else of the configuration, and the end of a
    document that Hunyuan's configuration states."""
    stated = files.generation.get("eos_token_id")
    if stated is None:
        stated = files.config.get("eos_token_id")
    every = [*(stated if isinstance(stated, list) else [stated]), files.config.get("eod_token_id")]
    return _ids(every)


def _suppressed_ids(files: TokenizerFiles) -> list[int]:
    """The tokens that the generation settings forbid in answers."""
    return _ids(listed(files.generation.get("suppress_tokens")))


def _ids(values: list[Any]) -> list[int]:
    return list(dict.fromkeys(id for id in values if isinstance(id, int) and id >= 0))


def _adding_flags(
    files: TokenizerFiles, ids: Mapping[str, int], keys: Mapping[str, Any]
) -> dict[str, bool]:
    """`add_bos_token` and `add_eos_token` from the settings, or else from the post-processor. Where
    both are true, readers need `add_sep_token`."""
    found: dict[str, bool] = {}
    first, last = _added_tokens(files, ids)
    named = {
        "add_bos_token": (first, ("bos_token_id", "cls_token_id")),
        "add_eos_token": (last, ("eos_token_id", "seperator_token_id")),
    }
    for key, (token, roles) in named.items():
        stated = files.settings.get(key)
        if isinstance(stated, bool):
            found[key] = stated
        elif files.json:
            found[key] = token is not None and token in [keys.get(role) for role in roles]
    if found and all(found.values()):
        found["add_sep_token"] = _separates(files)
    return found


def _separates(files: TokenizerFiles) -> bool:
    """Whether two tokens stand between the texts of a pair."""
    for step in parts(files.json.get("post_processor"), "processors"):
        if step.get("type") == "TemplateProcessing":
            items = listed(step.get("pair"))
            texts = [
                at for at, item in enumerate(items) if isinstance(item, dict) and "Sequence" in item
            ]
            return len(texts) == 2 and texts[1] - texts[0] == 3
        if step.get("type") == "RobertaProcessing":
            return True
    return False


def _added_tokens(files: TokenizerFiles, ids: Mapping[str, int]) -> tuple[int | None, int | None]:
    """The tokens that the post-processor adds before and after a text."""
    for step in parts(files.json.get("post_processor"), "processors"):
        kind = step.get("type")
        if kind == "TemplateProcessing":
            items = listed(step.get("single"))
            ends = [_special_text(item) for item in items[:1] + items[-1:]]
            if ends:
                return ids.get(ends[0]), ids.get(ends[1])
        elif kind in ("BertProcessing", "RobertaProcessing"):
            return _processing_id(step.get("cls"), ids), _processing_id(step.get("sep"), ids)
    return None, None


def _special_text(item: Any) -> str:
    """The text of a template's special token; empty for other items."""
    special = item.get("SpecialToken") if isinstance(item, Mapping) else None
    return str(special.get("id")) if isinstance(special, Mapping) else ""


def _processing_id(pair: Any, ids: Mapping[str, int]) -> int | None:
    """The id in a pair of a text and an id; None if the vocabulary lacks it."""
    id = pair[1] if isinstance(pair, list) and len(pair) == 2 else None
    return id if isinstance(id, int) and id in ids.values() else None
