"""Small sound files of every architecture and of every projector, to damage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoModel

from model_zoo.families import TEXT_FAMILIES, VISION_FAMILIES
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import UnsupportedModelError
from tests.parity import test_encoders, test_gemma3n, test_vision_qwen3vl
from tests.parity.test_divided_models import CONFIGS
from tests.parity.test_vision_engine import FAMILIES, Family
from tests.parity.test_vision_limits import FILES
from tests.parity.vision_agreement import FLAVOURS, make_seeing
from tests.tiny_models import write_tiny, write_tiny_llama

MODEL, PROJECTOR = "model.gguf", "mmproj-model.gguf"
_SEEING: Mapping[str, Sequence[str]] = {**FILES, "gemma4_small": FLAVOURS}
# Of those that only run with their eyes there are files with these.
_TEXT_MODELS = {name: config for name, config in CONFIGS.items() if "vl" not in name} | {
    "gemma3n": test_gemma3n.CONFIGS["plain"]
}
# Block types by their kernels' code: the matrices', and those of single tensors.
_LLAMAS = {
    "F16": {},
    "BF16": {"ffn_down": "F32"},
    "Q4_0": {"attn_v": "Q4_1", "ffn_down": "Q5_0", "ffn_up": "Q5_1"},
    "Q4_K": {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q6_K"},
    "Q3_K": {"attn_v": "IQ4_XS", "ffn_down": "Q2_K", "token_embd": "IQ4_NL"},
    "MXFP4": {"attn_v": "TQ2_0", "ffn_up": "TQ1_0"},
    "IQ2_XXS": {"attn_v": "IQ1_M", "ffn_down": "IQ3_S", "ffn_up": "IQ2_XS", "token_embd": "IQ2_S"},
    "IQ3_XXS": {"attn_v": "IQ1_S"},
}


@dataclass(frozen=True)
class Seed:
    """A model file, with the projector beside it where it has one."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    @property
    def projector(self) -> Path | None:
        path = self.folder / PROJECTOR
        return path if path.exists() else None


def write_seeds(folder: Path) -> list[Seed]:
    """AssertionError where an architecture or a projector is without a file."""
    seeds = [Seed(place) for place in _written(folder)]
    known = {_kind(path) for seed in seeds for path in (seed.model, seed.projector) if path}
    missing = (set(TEXT_FAMILIES) | set(VISION_FAMILIES)) - known
    assert not missing, f"no seed for {sorted(missing)}"
    return seeds


def _kind(path: Path) -> str:
    metadata = GGUFFile.open(path).metadata
    return str(metadata.get("clip.projector_type", metadata["general.architecture"]))


def _written(folder: Path) -> Iterator[Path]:
    for name, config in _TEXT_MODELS.items():
        for flavour, type in zip(FLAVOURS, ("q8_0", "f32"), strict=True):
            place = _new(folder / f"{name}-{flavour}")
            try:
                write_tiny(place / MODEL, config, type=type, flavour=flavour)
            except UnsupportedModelError:  # this flavour has no files of the architecture
                place.rmdir()
            else:
                yield place
    for name, config in test_encoders.CONFIGS.items():
        place = _new(folder / name)
        write_tiny(place / MODEL, config, maker=AutoModel)
        yield place
    for type, overrides in _LLAMAS.items():
        place = _new(folder / f"llama-{type}")
        write_tiny_llama(place / MODEL, config="rows_of_256", type=type, overrides=overrides)
        yield place
    for name, flavours in _SEEING.items():
        for flavour in flavours:
            place = _new(folder / f"{name}-images-{flavour}")
            _write_seeing(place, FAMILIES[name], flavour)
            yield place
    experts = test_vision_qwen3vl.CONFIGS["experts"]
    for flavour in FLAVOURS:
        place = _new(folder / f"qwen3vlmoe-images-{flavour}")
        _write_seeing(place, replace(FAMILIES["qwen3vl"], config=lambda: experts), flavour)
        yield place


def _write_seeing(folder: Path, family: Family, flavour: str) -> None:
    make_seeing(
        family.config(),
        folder,
        family.module.expected,
        special=family.module.SPECIAL,
        spelled=family.spelled,
        flavour=flavour,
        settings=family.settings,
        files=(MODEL, PROJECTOR),
    )


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
