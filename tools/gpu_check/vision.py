"""Checks tiny vision models against the CPU: features of towers, and the logits of conversations
with images, whose positions may be on several axes."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.registry import load
from tests.families.paged_decoder import PAGE_TOKENS, PagedDecoder
from tests.families.tower_families import TOWERS
from tests.families.towers import encoded, worst
from tests.families.vision_agreement import CONVERSATIONS
from tests.families.vision_families import VISION_MODELS
from tools.gpu_check.models import CPU, TOLERANCE
from tools.gpu_check.report import Check, Task

FIRST = "qwen3vl"  # its patches and positions have changed most
_TOWER_TOLERANCE = 1e-3  # of a row's largest feature
_NAMES = ("tiny.gguf", "mmproj-tiny.gguf")


def run(task: Task) -> None:
    task.make(_checks(task))


def _checks(task: Task) -> Iterator[Check]:
    some = 1 if task.dry else None
    for name in _names(task, TOWERS):
        for config, flavour in list(dict(TOWERS[name].cases).items())[:some]:
            label = f"tower {name}, {config}"
            yield label, partial(_check_tower, task, label, name, config, flavour)
    for name in _names(task, VISION_MODELS):
        for config in list(VISION_MODELS[name].configs)[:some]:
            label = f"model {name}, {config}"
            yield label, partial(_check_model, task, label, name, config)


def _names(task: Task, table: Iterable[str]) -> list[str]:
    return sorted(table, key=lambda name: name != FIRST)[: 1 if task.dry else None]


def _check_tower(task: Task, label: str, name: str, config: str, flavour: str) -> None:
    """In float32, of two images of each shape."""
    row = TOWERS[name]
    folder = task.folder / label
    folder.mkdir()
    pair = row.write(folder, config, flavour=flavour)
    file = GGUFFile.open(pair.path)
    scope = TensorScope(file, device=task.device, dtype=torch.float32)
    tower = row.build(scope, Metadata(file.metadata, path=pair.path))
    for shape in row.shapes[: 1 if task.dry else None]:
        pixels = row.pixels(pair, 2, shape)
        expected = encoded(pair.tower, pixels, row.grid(shape))
        found = encoded(tower, pixels.to(task.device), row.grid(shape)).cpu()
        error = worst(found, expected)
        task.report.check(f"{label}, {shape}", error <= _TOWER_TOLERANCE, error=error)


def _check_model(task: Task, label: str, name: str, config: str) -> None:
    folder = task.folder / label
    folder.mkdir()
    here = VISION_MODELS[name].write(folder, config, files=_NAMES)
    path, projector = (folder / file for file in _NAMES)
    there = load(
        path, projector=projector if projector.exists() else None, device=task.device,
        dtype=torch.float32,
    )  # fmt: skip
    for conversation in list(CONVERSATIONS)[: 1 if task.dry else None]:
        prompt = here.prompt(conversation)
        found = _logits(there, prompt, task.device).log_softmax(-1)
        expected = _logits(here.model, prompt, CPU).log_softmax(-1)
        known = expected.isfinite()  # the head may lack rows
        error = (found - expected)[known].abs().max().item()
        passed = error <= TOLERANCE and torch.equal(found.isfinite(), known)
        task.report.check(f"{label}, {conversation}", passed, error=error)


def _logits(model: ChatModel, prompt: Prompt, device: torch.device) -> Tensor:
    """Of all tokens of the prompt, on the CPU."""
    assert model.tower is not None
    features = {
        image.digest: encoded(model.tower, image.pixels.unsqueeze(0).to(device), image.grid)[0]
        for image in prompt.images
    }
    pages = -(-len(prompt.tokens) // PAGE_TOKENS) + 1
    paged = PagedDecoder(model.decoder, slots=1, pages_per_sequence=pages, device=device)
    paged.show(0, [(span, features[span.digest].cpu()) for span in prompt.spans])
    return paged.feed({0: prompt.tokens}).cpu()
