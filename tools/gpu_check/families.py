"""Checks the logits of tiny models of all families against the CPU, each configuration once."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel

from runtime.engine.request import ImageSpan
from tests.families.agreement import random_tokens
from tests.families.encoder_configs import ENCODERS
from tests.families.encoder_references import REFERENCES
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import DIVERSE, TEXT_MODELS
from tests.tiny_models import write_tiny
from tools.gpu_check.models import CPU, FAMILIES, TOLERANCE, check_logits, files_of, load_decoder
from tools.gpu_check.report import Check, Task


def run(task: Task) -> None:
    task.make(_checks(task))


def _checks(task: Task) -> Iterator[Check]:
    """Families that `models` does not check come first, the most different ones of these before the
    others; then further configurations of all families."""
    order = sorted(TEXT_MODELS, key=lambda name: name not in DIVERSE)
    others = [name for name in order if name not in FAMILIES][: 1 if task.dry else None]
    for name in others:
        for label, write in files_of(name):
            yield label, partial(_check_file, task, label, write)
    for name in () if task.dry else (*ENCODERS, *REFERENCES):
        yield f"encoder {name}", partial(_check_encoder, task, name)
    for name in () if task.dry else order:
        for config in list(TEXT_MODELS[name].configs)[1:]:
            label = f"{name}, {config}"
            write = partial(_write, name, config)
            yield label, partial(_check_file, task, label, write)


def _write(name: str, config: str, path: Path) -> None:
    TEXT_MODELS[name].write(path, config)


def _check_file(task: Task, name: str, write: Callable[[Path], None]) -> None:
    path = task.folder / f"{name}.gguf"
    write(path)
    there, here = (load_decoder(path, device, torch.float32) for device in (task.device, CPU))
    check_logits(task, name, there, here)


def _check_encoder(task: Task, name: str) -> None:
    """The states of two texts in one batch, with attention in both directions."""
    path = task.folder / f"{name}.gguf"
    if name in REFERENCES:
        REFERENCES[name].write(path)
    else:
        write_tiny(path, ENCODERS[name], maker=AutoModel)
    texts, found = (random_tokens(23, seed=2), random_tokens(60, seed=3)), list[Tensor]()
    for device in (task.device, CPU):
        paged = PagedDecoder(load_decoder(path, device, torch.float32), device=device)
        for slot, text in enumerate(texts):
            span = ImageSpan(0, len(text), whole=True, digest=b"")
            paged.show(slot, [(span, torch.empty(0, 0))])
        found.append(paged.states(dict(enumerate(texts))).cpu())
    error = (found[0] - found[1]).abs().max().item()
    task.report.check(f"encoder {name}", error <= TOLERANCE, error=error)
