"""Reads weights and tokenizer from the demo model's file, to continue its training."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Gemma3ForConditionalGeneration

from model_zoo.convert.mapping import OLLAMA, Conversion, Rule
from model_zoo.convert.transforms import plus_one
from model_zoo.gguf.reader import GGUFFile
from model_zoo.models.gemma3.checkpoint import CONVERSION as TEXT
from model_zoo.models.gemma3.vision_checkpoint import VISION
from tools.demo_model import byte_level_tokenizer, new_model

# The prefix of a module in `transformers` -> the table that converts its tensors.
_MODULES: dict[str, Conversion] = {
    "model.language_model.": TEXT,
    "model.vision_tower.": VISION,
    "model.": VISION,  # the projector
}


def read_model(path: Path) -> tuple[Gemma3ForConditionalGeneration, Tokenizer]:
    """The weights, dequantised to float32, and the tokenizer of a file written by training.

    ValueError if the file lacks one of the model's tensors.
    """
    file = GGUFFile.open(path)
    tokenizer = read_tokenizer(file)
    model = new_model(tokenizer)
    weights = {}
    for name, parameter in model.state_dict().items():
        if name != "lm_head.weight":  # tied to the embedding
            weights[name] = _stored(file, name).reshape(parameter.shape)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)
    return model, tokenizer


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of a file written by training."""
    tokens, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(merges, list)
    pairs = [merge.partition(" ") for merge in merges]
    return byte_level_tokenizer(tokens, [(first, second) for first, _, second in pairs])


def _stored(file: GGUFFile, name: str) -> torch.Tensor:
    """The parameter, converted back from its tensor in the file."""
    for rule, target in _rules(name):
        if target in file.tensors:
            value = file.weight(target).dequantize().clone()
            return value - 1 if rule.transform is plus_one else value
    raise ValueError(f"{file.path}: no tensor for {name}")


def _rules(name: str) -> Iterator[tuple[Rule, str]]:
    """The conversion rules of a parameter, and its name in the file."""
    for prefix, table in _MODULES.items():
        for rule in table.rules if name.startswith(prefix) else ():
            if OLLAMA not in rule.flavours or not isinstance(rule.source, str):
                continue
            pattern = re.escape(rule.source).replace(r"\{n\}", "(?P<n>[0-9]+)")
            pattern = pattern.replace(r"\.\*", r"\.(?P<kind>weight|bias)")
            found = re.fullmatch(pattern, name.removeprefix(prefix))
            if found:
                parts = found.groupdict()
                target = rule.target.replace("{n}", parts.get("n") or "")
                yield rule, target.replace(".*", f".{parts.get('kind')}")
