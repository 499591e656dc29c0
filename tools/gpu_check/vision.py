"""Checks tiny vision models: features of towers against the CPU, and the logits of conversations
with images, whose positions may be on several axes, against `transformers`."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.gguf.scope import TensorScope
from model_zoo.registry import load
from tests.families.paged_decoder import PAGE_TOKENS, PagedDecoder
from tests.families.tower_families import TOWERS
from tests.families.towers import encoded, worst
from tests.families.vision_agreement import CONVERSATIONS, VisionPair
from tests.families.vision_families import VISION_MODELS
from tools.gpu_check.models import TOLERANCE
from tools.gpu_check.report import Check, Task

FIRST = "qwen3vl"  # its patches and positions have changed most
_TOWER_TOLERANCE = 1e-3  # of a row's largest feature
_NAMES = ("tiny.gguf", "mmproj-tiny.gguf")


def run(task: Task) -> None:
    task.make(_checks(task))


def _checks(task: Task) -> Iterator[Check]:
    for name in _names(task, TOWERS):
        for config, flavour in dict(TOWERS[name].cases).items():
            label = f"tower {name}, {config}"
            yield label, partial(_check_tower, task, label, name, config, flavour)
    for name in _names(task, VISION_MODELS):
        for config in VISION_MODELS[name].configs:
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
    """Tower and decoder on the device; prompts in chunks."""
    folder = task.folder / label
    folder.mkdir()
    here = VISION_MODELS[name].write(folder, config, files=_NAMES)
    path, projector = (folder / file for file in _NAMES)
    there = load(
        path, projector=projector if projector.exists() else None, device=task.device,
        dtype=torch.float32,
    )  # fmt: skip
    pair = VisionPair(there, here.twin, here.expected)
    for conversation in list(CONVERSATIONS)[: 1 if task.dry else None]:
        prompt = pair.prompt(conversation)
        with torch.inference_mode():
            features = {
                image.digest: there.tower.encode(
                    image.pixels.unsqueeze(0).to(task.device), image.grid
                )[0].cpu()
                for image in prompt.images
            }
        pages = -(-len(prompt.tokens) // PAGE_TOKENS) + 1
        paged = PagedDecoder(there.decoder, slots=1, pages_per_sequence=pages, device=task.device)
        paged.show(0, [(span, features[span.digest]) for span in prompt.spans])
        error = pair.worst(paged.feed({0: prompt.tokens}).cpu(), prompt)
        task.report.check(f"{label}, {conversation}", error <= TOLERANCE, error=error)
