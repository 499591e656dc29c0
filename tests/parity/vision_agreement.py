"""Whole models with eyes against `transformers`: pictures and text in, log-probabilities out.

A test file names tiny configurations, makes a `Seeing` of each and runs CHECKS on it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.convert.convert import convert
from model_zoo.registry import load
from runtime.engine.request import ImageSpan
from runtime.vision.encoder import PreparedImage
from tests.parity.paged_decoder import PagedDecoder
from tests.tiny_models import END, END_OF_TEXT, tiny_tokenizer, write_tiny_folder
from tests.vision_prompts import TEMPLATE, png

TOLERANCE = 1e-3  # of log-probabilities
FLAVOURS = ("llama.cpp", "ollama")
CPU = torch.device("cpu")

WIDE, TALL = ImagePart(png(60, 130)), ImagePart(png(150, 70, seed=1))
TALKS = {
    "one image": [Message("user", (WIDE, "What is this?"))],
    "two images in one message": [Message("user", (WIDE, TALL, "Compare them."))],
    "images in two turns": [
        Message("user", (WIDE, "This?")),
        Message("assistant", "A hill."),
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
class Seeing:
    """A loaded model and its twin; `expected` asks the twin."""

    model: ChatModel
    twin: Any
    expected: Expected

    def prompt(self, about: str) -> Prompt:
        return self.model.prepare(TALKS[about])

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
    """Behind all tokens of the tiny tokenizer."""
    first = tiny_tokenizer().get_vocab_size()
    return {text: first + index for index, text in enumerate(special)}


def make_seeing(
    config: PreTrainedConfig,
    folder: Path,
    expected: Expected,
    *,
    special: Sequence[str],
    spelled: str,
    flavour: str,
    settings: dict[str, Any] | None = None,
    files: tuple[str, str] = ("tiny.gguf", "mmproj-tiny.gguf"),
    **options: Any,
) -> Seeing:
    """`special`: further tokens; `spelled`: what the template writes for an image.

    `settings`: of the image processor, as the checkpoint states them; `options`: of
    `write_tiny_folder`.
    """
    source = folder / "checkpoint"
    rows = {"padding_rows": len(special)} | options
    twin = write_tiny_folder(source, config, **rows)
    _write_tokenizer(source, special, spelled)
    (source / "preprocessor_config.json").write_text(json.dumps(settings or {}))
    path, projector = (folder / name for name in files)
    convert(source, path, type="f32", flavour=flavour)
    own = projector if projector.exists() else None
    assert (own is None) == (flavour == "ollama")
    model = load(path, projector=own, device=CPU, dtype=torch.float32)
    return Seeing(model, twin, expected)


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


def shown_in_order(prompt: Prompt) -> list[PreparedImage]:
    """The image of each place in the prompt, also where it comes again."""
    images = {image.digest: image for image in prompt.images}
    firsts = [span for span in prompt.spans if span.first_row == 0]
    return [images[span.digest] for span in firsts]


def rectangles(prompt: Prompt, place: int, *, merge: int) -> dict[str, Any]:
    """What the models of Qwen are asked with."""
    ids = torch.tensor([prompt.tokens])
    images = shown_in_order(prompt)
    if not images:
        return {"input_ids": ids}
    grids = [[1, image.grid[0] * merge, image.grid[1] * merge] for image in images]
    return {
        "input_ids": ids,
        "pixel_values": torch.cat([image.pixels for image in images]),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == place).int(),
    }


def fed(seeing: Seeing, prompts: Sequence[Prompt], cuts: Sequence[int] = ()) -> list[Tensor]:
    """Logits of whole prompts together, each in a slot of its own; cut at `cuts`."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    pages = -(-longest // 8) + 1
    paged = PagedDecoder(seeing.model.decoder, slots=len(prompts), pages_per_sequence=pages)
    for slot, prompt in enumerate(prompts):
        paged.show(slot, seeing.features(prompt))
    found: list[list[Tensor]] = [[] for _ in prompts]
    for begin, end in zip((0, *cuts), (*cuts, longest), strict=True):
        parts = {slot: prompt.tokens[begin:end] for slot, prompt in enumerate(prompts)}
        parts = {slot: part for slot, part in parts.items() if part}
        logits = paged.feed(parts)
        for slot, rows in zip(parts, logits.split([len(p) for p in parts.values()]), strict=True):
            found[slot].append(rows)
    return [torch.cat(rows) for rows in found]


def check_talks(seeing: Seeing) -> None:
    for about in TALKS:
        prompt = seeing.prompt(about)
        [logits] = fed(seeing, [prompt])
        assert seeing.worst(logits, prompt) <= TOLERANCE, about


def check_chunks(seeing: Seeing) -> None:
    """Cut before, between and behind images; within one where its rows need not stay together."""
    prompt = seeing.prompt("images in two turns")
    first, last = prompt.spans[0], prompt.spans[-1]
    cuts = [first.start, first.end, last.start, last.end]
    if not first.whole:
        cuts += [first.start + 1, (last.start + last.end) // 2]
    cuts = sorted({cut for cut in cuts if 0 < cut < len(prompt.tokens)})
    [logits] = fed(seeing, [prompt], cuts)
    assert seeing.worst(logits, prompt) <= TOLERANCE


def check_crowd(seeing: Seeing) -> None:
    """Two requests with images and two without, in one batch."""
    abouts = ["images in two turns", "text alone", "an image in the middle", "text alone"]
    prompts = [seeing.prompt(about) for about in abouts]
    for prompt, logits in zip(prompts, fed(seeing, prompts), strict=True):
        assert seeing.worst(logits, prompt) <= TOLERANCE


def check_images_are_seen(seeing: Seeing) -> None:
    """Another image, other logits: so the checks above mean something."""
    prompt = seeing.model.prepare([Message("user", (WIDE, "What is this?"))])
    other = seeing.model.prepare([Message("user", (ImagePart(png(60, 130, 5)), "What is this?"))])
    assert prompt.tokens == other.tokens
    [logits], [others] = fed(seeing, [prompt]), fed(seeing, [other])
    one, another = (rows[-1].log_softmax(-1) for rows in (logits, others))
    known = one.isfinite()  # the head may lack rows
    assert (one - another)[known].abs().max() > 10 * TOLERANCE


CHECKS: dict[str, Callable[[Seeing], None]] = {
    "talks": check_talks,
    "chunks": check_chunks,
    "crowd": check_crowd,
    "images_are_seen": check_images_are_seen,
}
