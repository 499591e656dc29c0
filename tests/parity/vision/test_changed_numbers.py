"""Vision models with one changed number in the file: the engine starts or the file is refused.

Any other exception at start would reach users without an explanation.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from model_zoo.gguf.reader import GGUFFile
from model_zoo.registry import load
from runtime.errors import CaravanError
from tests.families.vision_agreement import CPU, VisionPair
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import rewrite
from tests.parity.vision.test_vision_engine import running
from tests.parity.vision.test_vision_limits import SAME_LIMITS

CHANGES = 6  # of each family and flavour
NUMBERS = (0, 1, 2, 3, 5, 7, 13, 53, 211, 1000, 65_537, 1 << 26, (1 << 31) - 1)
FACTORS = (0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), 3.7)
MEMORY_BYTES = 1 << 28  # larger models are refused at start


def changes(path: Path) -> Iterator[tuple[str, Any]]:
    """Keys of the model's metadata with other values for them; None removes the key."""
    for key, value in GGUFFile.open(path).metadata.items():
        if key.startswith(("general.", "tokenizer.")) or isinstance(value, str | bool | np.bool_):
            continue
        yield key, None
        if isinstance(value, list | np.ndarray):
            items = [item.item() if isinstance(item, np.generic) else item for item in value]
            yield from ((key, items[:count]) for count in range(1, len(items)))
            yield key, items + items
            yield from ((key, [other] * len(items)) for other in _others(items[0]))
        else:
            plain = value.item() if isinstance(value, np.generic) else value
            yield from ((key, other) for other in _others(plain))


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return list(FACTORS)
    if not isinstance(value, int):
        return []
    return [*NUMBERS, max(value - 1, 0), value + 1, 2 * value]


CASES = [
    (name, flavour)
    for name, row in VISION_MODELS.items()
    if name not in SAME_LIMITS
    for flavour in row.flavours
]


@pytest.mark.parametrize(("family", "flavour"), CASES, ids=str)
def test_a_changed_number_is_served_or_refused_with_an_error(tmp_path, family, flavour) -> None:
    known, random = VISION_MODELS[family], Random(f"{family} {flavour}")
    sound = known.write(tmp_path, flavour=flavour)
    with running(sound, memory_bytes=MEMORY_BYTES):
        pass
    own = tmp_path / "mmproj-tiny.gguf"
    source = own if own.exists() else tmp_path / "tiny.gguf"
    architecture = GGUFFile.open(source).metadata["general.architecture"]
    for key, value in random.sample(list(changes(source)), CHANGES):
        changed = tmp_path / f"changed-{source.name}"
        rewrite(source, changed, keys={"general.architecture": architecture, key: value})
        files = (tmp_path / "tiny.gguf", changed) if own.exists() else (changed, None)
        try:
            model = load(files[0], projector=files[1], device=CPU, dtype=torch.float32)
            with running(VisionPair(model, None, known.expected), memory_bytes=MEMORY_BYTES):
                pass
        except CaravanError as refused:
            assert len(str(refused)) > 20
        except Exception as error:
            error.add_note(f"`{key}` is {value}")
            raise
