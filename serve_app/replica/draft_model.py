"""Loads the draft model of a served model, and compares the two vocabularies."""

from pathlib import Path

import torch

from model_zoo.chat_model import ChatModel
from model_zoo.registry import LoadOptions, load
from model_zoo.tokenizers.tokenizer import Tokenizer
from runtime.errors import CaravanError, ConfigurationError

# One vocabulary may have this many more tokens at its end, as padding; as in llama.cpp.
MAX_FURTHER_TOKENS = 128


def load_draft(
    path: Path,
    target: Tokenizer,
    *,
    device: torch.device,
    dtype: torch.dtype,
    options: LoadOptions,
) -> ChatModel:
    """The draft model for a model with the tokenizer `target`. Raises errors of `load`, and
    ConfigurationError if vocabularies differ."""
    try:
        draft = load(path, device=device, dtype=dtype, options=options)
    except CaravanError as error:
        raise type(error)(f"`speculation.draft`: {error}") from None
    check_vocabularies(draft.tokenizer, target)
    return draft


def check_vocabularies(draft: Tokenizer, target: Tokenizer) -> None:
    """ConfigurationError unless equal ids stand for equal tokens."""
    name = "The model of `speculation.draft` has another vocabulary than the model"
    ours, theirs = target.vocabulary, draft.vocabulary
    if abs(len(ours.tokens) - len(theirs.tokens)) > MAX_FURTHER_TOKENS:
        raise ConfigurationError(
            f"{name}: {len(theirs.tokens):,} tokens instead of {len(ours.tokens):,}. Configure a "
            "draft model of the same family."
        )
    pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
    different = next((token for token, (one, other) in pairs if one != other), None)
    if different is not None:
        raise ConfigurationError(
            f"{name}: token {different} is {theirs.tokens[different][:40]!r} instead of "
            f"{ours.tokens[different][:40]!r}. Configure a draft model of the same family."
        )
    for role in ("bos_id", "eos_id"):
        one, other = getattr(ours, role), getattr(theirs, role)
        if one != other:
            raise ConfigurationError(
                f"{name}: `{role.replace('_', '_token_')}` is {other} instead of {one}. Configure "
                "a draft model of the same family."
            )
