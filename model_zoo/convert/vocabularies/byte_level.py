"""Byte-level BPE: vocabulary, merges and the name of the pre-tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from model_zoo.convert.vocabularies.expressions import canonical
from model_zoo.convert.vocabularies.files import TokenizerFiles, parts
from model_zoo.convert.vocabularies.tokens import TokenTable
from model_zoo.families import family_or_defaults
from model_zoo.tokenizers.pretokenizers import MERGED_WITH_NEXT, PRE_TOKENIZERS
from model_zoo.tokenizers.vocabulary import TokenType
from runtime.errors import UnsupportedModelError

_PUNCTUATION, _GPT2 = PRE_TOKENIZERS["falcon"].expressions


def is_byte_level(files: TokenizerFiles) -> bool:
    steps = parts(files.json.get("pre_tokenizer"), "pretokenizers")
    steps += parts(files.json.get("decoder"), "decoders")
    return any(step.get("type") == "ByteLevel" for step in steps)


def byte_level(files: TokenizerFiles, architecture: str) -> tuple[TokenTable, dict[str, Any]]:
    """The token table and `tokenizer.ggml` keys; refuses unknown pre-tokenizers."""
    table = TokenTable()
    for text, id in vocabulary(files).items():
        table.put(id, text, TokenType.NORMAL)
    table.add(files.added_tokens())
    keys = {"model": "gpt2", "pre": _pre_tokenizer(files, architecture), "merges": merges(files)}
    return table, keys


def vocabulary(files: TokenizerFiles) -> Mapping[str, int]:
    stated = files.model.get("vocab")
    if not isinstance(stated, Mapping) or not stated:
        raise files.error("tokenizer.json", "has no vocabulary")
    return {text: files.checked_id("tokenizer.json", id) for text, id in stated.items()}


def merges(files: TokenizerFiles) -> list[str]:
    """The merges, each as two tokens separated by a space; newer files have pairs."""
    stated = files.model.get("merges")
    if not isinstance(stated, list) or not stated:
        raise files.error("tokenizer.json", "has no merges")
    try:
        return [merge if isinstance(merge, str) else " ".join(merge) for merge in stated]
    except TypeError:
        raise files.error("tokenizer.json", "has a merge that is no pair of texts") from None


def _pre_tokenizer(files: TokenizerFiles, architecture: str) -> str:
    """The name of the table's row with these expressions, before and after bytes are mapped to
    characters; the architecture's or the first of several.

    Rows that agree with the tokenizer on `ignore_merges` have priority, among these rows that agree
    on normalisation.
    """
    stated = _expressions(files)
    whole = bool(files.model.get("ignore_merges"))
    nfc = any(
        step.get("type") == "NFC" for step in parts(files.json.get("normalizer"), "normalizers")
    )
    spelt = [list(map(canonical, expressions)) for expressions in stated]
    rows = {
        name: row
        for name, row in PRE_TOKENIZERS.items()
        if spelt == [list(map(canonical, found)) for found in (row.expressions, row.on_bytes)]
    }
    if not rows:
        raise UnsupportedModelError(
            f"{files.folder / 'tokenizer.json'}: splits text by {_quoted(*stated)}, which is "
            "none of the expressions that model families use."
        )
    own = family_or_defaults(architecture).pre_tokenizer
    alike = [name for name, row in rows.items() if row.whole_pieces == whole] or list(rows)
    alike = [name for name in alike if rows[name].nfc == nfc] or alike
    return own if own in alike and own != "default" else alike[0]


def _expressions(files: TokenizerFiles) -> tuple[list[str], list[str]]:
    """The regular expressions in order, as in the rows of the table: those for text, and those for
    the visible characters that represent its bytes."""
    of_text: list[str] = []
    of_bytes: list[str] = []
    found = of_text
    for step in parts(files.json.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        if kind == "Split" and (expression := _isolating(step)) is not None:
            found.append(expression)
        elif kind == "Digits":
            found.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif kind == "Punctuation" and step.get("behavior") == "Contiguous":
            found.append(_PUNCTUATION)
        elif kind == "ByteLevel":
            found += [_GPT2] if step.get("use_regex", True) else []
            found = of_bytes
        else:
            raise UnsupportedModelError(
                f"{files.folder / 'tokenizer.json'}: its pre-tokenizer has a step {kind} that is "
                "not supported; Split by an expression, Digits, ByteLevel and contiguous "
                "Punctuation are."
            )
    return of_text, of_bytes


def _isolating(step: Mapping[str, Any]) -> str | None:
    """The expression whose matches become pieces; None if none is known."""
    pattern, behaviour = step.get("pattern"), (step.get("behavior"), step.get("invert") is True)
    expression = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    if not isinstance(expression, str):
        return None
    if behaviour == ("MergedWithNext", False):
        return MERGED_WITH_NEXT.get(expression)
    # Inverted removal is equivalent, because it keeps matches and these expressions match
    # everything.
    isolates = behaviour[0] == "Isolated" or behaviour == ("Removed", True)
    return expression if isolates else None


def _quoted(of_text: Sequence[str], of_bytes: Sequence[str]) -> str:
    quoted = [repr(expression[:80]) for expression in of_text]
    quoted += [f"{expression[:80]!r} after ByteLevel" for expression in of_bytes]
    return ", ".join(quoted) or "no expression"
