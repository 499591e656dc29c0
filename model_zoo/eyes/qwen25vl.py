"""Qwen2.5-VL's eyes: images keep their shape, and their area is bounded."""

from model_zoo.eyes.numbers import read_areas, read_normalisation
from model_zoo.eyes.parts import EyeParts
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import CLIP
from model_zoo.placement.qwen import QwenPlacement
from model_zoo.processors.qwen_vl import QwenVLProcessor
from model_zoo.tokenizer import Tokenizer
from model_zoo.towers.qwen25vl import FRAMES, MERGED, MOST_PIXELS, build_tower

PATCH, LEAST_PIXELS = 14, 3136
CLIP_KEYS = "vision.image_min_pixels", "vision.image_max_pixels"
OLLAMA_KEYS = "vision.min_pixels", "vision.max_pixels"


def build_eyes(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> EyeParts:
    keys = CLIP_KEYS if metadata.architecture == "clip" else OLLAMA_KEYS
    least, most = read_areas(metadata, *keys, defaults=(LEAST_PIXELS, MOST_PIXELS))
    processor = QwenVLProcessor(
        patch=metadata.get_size("vision.patch_size", PATCH),
        merge=metadata.get_size("vision.spatial_merge_size", MERGED),
        frames=FRAMES,
        min_pixels=least,
        max_pixels=most,
        normalisation=read_normalisation(metadata, CLIP),
    )
    tower = build_tower(w, metadata, most_rows=processor.most_rows)
    return EyeParts(tower, processor, QwenPlacement(tokenizer))
