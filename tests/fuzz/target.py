"""What is done with every damaged file: all that serving it would do before the first token."""

from pathlib import Path

import torch

from model_zoo.chat import Message
from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.errors import ModelFileError, RequestError

# A user's text that holds what templates and tokenizers look for.
TEXT = "Hello <|im_end|> <think> 12345 don't\n\n\tnaïve 東京 👍 </s><0x41>"
_META = torch.device("meta")


def exercise(path: Path) -> str:
    """How far the file came. Any other error than those caught here is a defect."""
    try:
        file = GGUFFile.open(path)
        for name in file.tensors:
            file.weight(name).dequantize()
    except ModelFileError:
        return "refused by the reader"
    try:
        model = load(path, device=_META, dtype=torch.float32)
    except ModelFileError:
        return "refused by the registry"
    try:
        prompts = [
            model.prepare_text(TEXT),
            model.prepare([Message("system", TEXT), Message("user", TEXT)]),
        ]
    except RequestError:
        return "refused by the template"
    for prompt in prompts:
        model.tokenizer.decode(prompt.tokens)
    return "loaded"
