"""Small valid files of every architecture and every projector, to mutate."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModel

from model_zoo.families import TEXT_FAMILIES, VISION_FAMILIES
from model_zoo.gguf.reader import GGUFFile
from runtime.errors import UnsupportedModelError
from tests.families.encoder_configs import ENCODERS
from tests.families.encoder_references import REFERENCES
from tests.families.text_families import TEXT_MODELS
from tests.families.vision_agreement import FLAVOURS
from tests.families.vision_families import VISION_MODELS
from tests.tiny_models import write_tiny, write_tiny_llama

MODEL, PROJECTOR = "model.gguf", "mmproj-model.gguf"
# Models that only run with their vision model get files below; llamas are in `_LLAMAS`.
_TEXT_MODELS = {
    name: (
        row.config(row.divided or "plain"),
        {key: row.options[key] for key in ("maker", "save") if key in row.options},
    )
    for name, row in TEXT_MODELS.items()
    if "vl" not in name and name not in ("llama", "mistral", "mllama")
}
# Block types of the matrices, and of single tensors: together they cover all kernels.
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
    """The folder of a model file and, for some, its projector."""

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
    """Raises AssertionError if an architecture or a projector has no seed."""
    seeds = [Seed(place) for place in _written(folder)]
    known = {_kind(path) for seed in seeds for path in (seed.model, seed.projector) if path}
    missing = (set(TEXT_FAMILIES) | set(VISION_FAMILIES)) - known
    assert not missing, f"no seed for {sorted(missing)}"
    return seeds


def _kind(path: Path) -> str:
    metadata = GGUFFile.open(path).metadata
    return str(metadata.get("clip.projector_type", metadata["general.architecture"]))


def _written(folder: Path) -> Iterator[Path]:
    for name, (config, options) in _TEXT_MODELS.items():
        for flavour, type in zip(FLAVOURS, ("q8_0", "f32"), strict=True):
            place = _new(folder / f"{name}-{flavour}")
            try:
                write_tiny(place / MODEL, config, type=type, flavour=flavour, **options)
            except UnsupportedModelError:  # the flavour does not have this architecture
                place.rmdir()
            else:
                yield place
    for name, row in TEXT_MODELS.items():
        for variant, spelled in row.variants.items():
            if spelled.architecture is not None:
                place = _new(folder / f"{name}-{variant}")
                renamed, _ = row.variant(place / "twin.gguf", variant)
                renamed.rename(place / MODEL)
                (place / "twin.gguf").unlink(missing_ok=True)
                yield place
    for name, config in ENCODERS.items():
        place = _new(folder / name)
        write_tiny(place / MODEL, config, maker=AutoModel)
        yield place
    for name, reference in REFERENCES.items():
        place = _new(folder / name)
        reference.write(place / MODEL)
        yield place
    for type, overrides in _LLAMAS.items():
        place = _new(folder / f"llama-{type}")
        write_tiny_llama(place / MODEL, config="rows_of_256", type=type, overrides=overrides)
        yield place
    for name, row in VISION_MODELS.items():
        for flavour in row.flavours:
            place = _new(folder / f"{name}-images-{flavour}")
            row.write(place, flavour=flavour, files=(MODEL, PROJECTOR))
            yield place
    for flavour in FLAVOURS:
        place = _new(folder / f"qwen3vlmoe-images-{flavour}")
        VISION_MODELS["qwen3vl"].write(place, "experts", flavour=flavour, files=(MODEL, PROJECTOR))
        yield place


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
