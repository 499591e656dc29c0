"""Qwen3-VL and Qwen 3.5 with images, which keep their aspect ratio; in Qwen3-VL, several layers
provide features."""

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.scope import TensorScope
from model_zoo.images.normalise import STANDARD
from model_zoo.models.qwen3vl.vision import qwen3vl_tower
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.context_share import scaled_to_context
from model_zoo.multimodal.image_settings import CLIP_AREAS, read_areas
from model_zoo.multimodal.multimodal_spec import MultimodalSpec
from model_zoo.multimodal.qwen_placeholders import qwen_placeholders
from model_zoo.tokenizers.tokenizer import Tokenizer

# Defaults for files without bounds, such as those of llama.cpp's converter. The minimum is that of
# every checkpoint and of Ollama's imageprocessor.go (64 << 10). Maxima differ:
# 16 << 20 in the checkpoints (16,384 rows, more than the context that most configurations serve),
# 4,096 rows (4 << 20) in llama.cpp's clip.cpp, 2 << 20 in Ollama's imageprocessor.go. The last
# leaves room for text in a context of 4,096 tokens.
LEAST_PIXELS, MOST_PIXELS = 64 << 10, 2 << 20
OLLAMA_AREAS = "vision.shortest_edge", "vision.longest_edge"


def build_multimodal(w: TensorScope, metadata: Metadata, tokenizer: Tokenizer) -> MultimodalSpec:
    processor = scaled_to_context(read_processor(metadata), w.context_tokens)
    tower = qwen3vl_tower(w, metadata, processor)
    return MultimodalSpec(tower, processor, qwen_placeholders(tokenizer), depth=tower.depth)


def read_processor(metadata: Metadata) -> BoundedProcessor:
    """The processor. Like the checkpoints, Ollama's files state areas under the keys of edges."""
    keys = CLIP_AREAS if metadata.architecture == "clip" else OLLAMA_AREAS
    areas = read_areas(metadata, *keys, defaults=(LEAST_PIXELS, MOST_PIXELS))
    return BoundedProcessor.read(metadata, areas, STANDARD)
