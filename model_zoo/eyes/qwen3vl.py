"""Qwen3-VL's eyes: images keep their shape, and features come from several layers of the tower."""

from model_zoo.eyes.numbers import read_areas, read_normalisation
from model_zoo.eyes.parts import EyeParts
from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.placement.qwen import QwenPlacement
from model_zoo.processors.qwen_vl import QwenVLProcessor
from model_zoo.tokenizer import Tokenizer
from model_zoo.towers.qwen3vl import FRAMES, MERGED, MOST_PIXELS, build_tower

LEAST_PIXELS = 65_536
CLIP_KEYS = "vision.image_min_pixels", "vision.image_max_pixels"
OLLAMA_KEYS = "vision.shortest_edge", "vision.longest_edge"


def build_eyes(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> EyeParts:
    """What Ollama's files call edges are areas, as in the checkpoints."""
    keys = CLIP_KEYS if metadata.architecture == "clip" else OLLAMA_KEYS
    least, most = read_areas(metadata, *keys, defaults=(LEAST_PIXELS, MOST_PIXELS))
    processor = QwenVLProcessor(
        patch=metadata.require_size("vision.patch_size"),
        merge=metadata.get_size("vision.spatial_merge_size", MERGED),
        frames=FRAMES,
        min_pixels=least,
        max_pixels=most,
        normalisation=read_normalisation(metadata, STANDARD),
    )
    tower = build_tower(w, metadata, most_rows=processor.most_rows)
    return EyeParts(tower, processor, QwenPlacement(tokenizer), depth=tower.depth)
