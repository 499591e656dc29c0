"""Whole vision models against `transformers`: pictures and text in, log-probabilities out.

`vision_families.py` names tiny configurations; CHECKS run on a `VisionPair` of each.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.convert.convert_folder import convert
from model_zoo.registry import load
from runtime.engine.request import ImageSpan
from tests.families.paged_decoder import PagedDecoder
from tests.tiny_models import (
    END,
    END_OF_TEXT,
    Recipe,
    Save,
    copied,
    save_pretrained,
    tiny_tokenizer,
    write_tiny_folder,
)
from tests.vision_prompts import TEMPLATE, png

TOLERANCE = 1e-3  # of log-probabilities
FLAVOURS = ("llama.cpp", "ollama")
CPU = torch.device("cpu")

WIDE, TALL = ImagePart(png(60, 130)), ImagePart(png(150, 70, seed=1))
CONVERSATIONS = {
    "one image": [Message("user", (WIDE, "What is this?"))],
    "two images in one message": [Message("user", (WIDE, TALL, "Compare them."))],
    "images in two turns": [
        Message("user", (WIDE, "This?")),
        Message("assistant", "A hill, behind it the lazy dog sleeps."),
        Message("user", (TALL, "And this?")),
    ],
    "an image in the middle": [Message("user", ("the quick brown fox\n", TALL, "\nsays hello"))],
    "the same image twice": [
        Message("user", ("hello", WIDE)),
        Message("assistant", "there"),
        Message("user", (WIDE, "again")),
    ],
    "text alone": [Message("user", "hello there, the lazy dog")],
}

# The logits [tokens, vocabulary] of a twin for a prompt.
Expected = Callable[[Any, Prompt], Tensor]


@dataclass(frozen=True)
class VisionPair:
    """A loaded model and its twin; `expected` computes logits of the twin."""

    model: ChatModel
    twin: Any
    expected: Expected

    def prompt(self, name: str) -> Prompt:
        return self.model.prepare(CONVERSATIONS[name])

    def features(self, prompt: Prompt) -> list[tuple[ImageSpan, Tensor]]:
        """Each span with the features of its image."""
        assert self.model.tower is not None
        with torch.inference_mode():
            made = {
                image.digest: self.model.tower.encode(image.pixels.unsqueeze(0), image.grid)[0]
                for image in prompt.images
            }
        return [(span, made[span.digest]) for span in prompt.spans]

    def worst(self, logits: Tensor, prompt: Prompt) -> float:
        """The largest difference of log-probabilities of the prompt's last rows."""
        with torch.inference_mode():
            expected = self.expected(self.twin, prompt)[-len(logits) :]
        known = expected.shape[1]
        ours = logits[:, :known].log_softmax(-1)
        return (ours - expected.log_softmax(-1)).abs().max().item()


def special_ids(special: Sequence[str]) -> dict[str, int]:
    """Ids of further tokens, behind all tokens of the tiny tokenizer."""
    first = tiny_tokenizer().get_vocab_size()
    return {text: first + index for index, text in enumerate(special)}


def make_vision_pair(
    config: PreTrainedConfig,
    folder: Path,
    expected: Expected,
    *,
    special: Sequence[str],
    spelled: str,
    flavour: str,
    settings: dict[str, Any] | None = None,
    files: tuple[str, str] = ("tiny.gguf", "mmproj-tiny.gguf"),
    save: Save = save_pretrained,
) -> VisionPair:
    """Write a tiny model of `config` to `folder`, convert and load it.

    `special`: further tokens; `spelled`: what the template writes for an image; `settings`: those
    of the image processor, as the checkpoint states them; `save`: as of `write_tiny`.
    """
    source, processor = folder / "checkpoint", json.dumps(settings or {})
    twin = write_checkpoint(config, source, special=special, spelled=spelled, save=save)
    (source / "preprocessor_config.json").write_text(processor)
    path, projector = (folder / name for name in files)
    checkpoint = (Recipe.of(config), tuple(special), spelled, save)
    for place, content in zip(
        (path, projector), _converted(*checkpoint, processor, flavour), strict=False
    ):
        place.write_bytes(content)
    own = projector if projector.exists() else None
    assert (own is None) == (flavour == "ollama")
    model = load(path, projector=own, device=CPU, dtype=torch.float32)
    return VisionPair(model, twin, expected)


def write_checkpoint(
    config: PreTrainedConfig,
    folder: Path,
    *,
    special: Sequence[str],
    spelled: str,
    save: Save = save_pretrained,
) -> Any:
    """Write a tiny model with further tokens, and a template that shows images; returns it."""
    files, twin = _checkpoint(Recipe.of(config), tuple(special), spelled, save)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return copied(twin)


# The tests of a family need the same checkpoint, and most of them the same file.
@lru_cache(maxsize=128)
def _checkpoint(
    recipe: Recipe, special: tuple[str, ...], spelled: str, save: Save
) -> tuple[Mapping[str, bytes], Any]:
    """The files of the folder, and the twin."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        twin = write_tiny_folder(folder, recipe.config, padding_rows=len(special), save=save)
        _write_tokenizer(folder, special, spelled)
        return {file.name: file.read_bytes() for file in folder.iterdir()}, twin


@lru_cache(maxsize=128)
def _converted(
    recipe: Recipe,
    special: tuple[str, ...],
    spelled: str,
    save: Save,
    processor: str,
    flavour: str,
) -> list[bytes]:
    """The file, and that of the projector if it is one of its own."""
    files, _ = _checkpoint(recipe, special, spelled, save)
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "checkpoint"
        source.mkdir()
        for name, content in (files | {"preprocessor_config.json": processor.encode()}).items():
            (source / name).write_bytes(content)
        paths = convert(source, Path(place) / "tiny.gguf", type="f32", flavour=flavour)
        return [path.read_bytes() for path in paths]


def _write_tokenizer(folder: Path, special: Sequence[str], spelled: str) -> None:
    native = Tokenizer.from_str(tiny_tokenizer().to_str())
    native.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=native,
        bos_token=END_OF_TEXT,
        eos_token=END,
        pad_token=END_OF_TEXT,
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", spelled)
    tokenizer.save_pretrained(folder)


def fed(pair: VisionPair, prompts: Sequence[Prompt], cuts: Sequence[int] = ()) -> list[Tensor]:
    """Logits of prompts fed together, each in its own slot, in chunks that end at `cuts`."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    pages = -(-longest // 8) + 1
    paged = PagedDecoder(pair.model.decoder, slots=len(prompts), pages_per_sequence=pages)
    for slot, prompt in enumerate(prompts):
        paged.show(slot, pair.features(prompt))
    found: list[list[Tensor]] = [[] for _ in prompts]
    for begin, end in zip((0, *cuts), (*cuts, longest), strict=True):
        parts = {slot: prompt.tokens[begin:end] for slot, prompt in enumerate(prompts)}
        parts = {slot: part for slot, part in parts.items() if part}
        logits = paged.feed(parts)
        for slot, rows in zip(parts, logits.split([len(p) for p in parts.values()]), strict=True):
            found[slot].append(rows)
    return [torch.cat(rows) for rows in found]


def check_conversations(pair: VisionPair) -> None:
    for name in CONVERSATIONS:
        prompt = pair.prompt(name)
        [logits] = fed(pair, [prompt])
        assert pair.worst(logits, prompt) <= TOLERANCE, name


def check_chunks(pair: VisionPair) -> None:
    """Chunks end before, between and after images, and inside one where the model allows it."""
    prompt = pair.prompt("images in two turns")
    first, last = prompt.spans[0], prompt.spans[-1]
    cuts = [first.start, first.end, last.start, last.end]
    if not first.whole:
        cuts += [first.start + 1, (last.start + last.end) // 2]
    cuts = sorted({cut for cut in cuts if 0 < cut < len(prompt.tokens)})
    [logits] = fed(pair, [prompt], cuts)
    assert pair.worst(logits, prompt) <= TOLERANCE


def check_batch(pair: VisionPair) -> None:
    """Two requests with images and two without, in one batch."""
    names = ["images in two turns", "text alone", "an image in the middle", "text alone"]
    prompts = [pair.prompt(name) for name in names]
    for prompt, logits in zip(prompts, fed(pair, prompts), strict=True):
        assert pair.worst(logits, prompt) <= TOLERANCE


def check_images_change_logits(pair: VisionPair) -> None:
    """Shows that the checks above compare what images contribute."""
    prompt = pair.model.prepare([Message("user", (WIDE, "What is this?"))])
    other = pair.model.prepare([Message("user", (ImagePart(png(60, 130, 5)), "What is this?"))])
    assert prompt.tokens == other.tokens
    [logits], [others] = fed(pair, [prompt]), fed(pair, [other])
    one, another = (rows[-1].log_softmax(-1) for rows in (logits, others))
    known = one.isfinite()  # the head may lack rows
    assert (one - another)[known].abs().max() > 10 * TOLERANCE


CHECKS: dict[str, Callable[[VisionPair], None]] = {
    "conversations": check_conversations,
    "chunks": check_chunks,
    "batch": check_batch,
    "images_change_logits": check_images_change_logits,
}
