"""Writes a GGUF file of a Gemma 3 with vision and random weights, for benchmarks."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from bench.cache import written_once
from model_zoo.gguf.reader import GGUFFile
from tests.checkout import DEMO_MODEL
from tools.demo_file import read_tokenizer
from tools.demo_model import CONTROL_TOKENS, IMAGE_TOKENS, write_vision_model

CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class VisionModelShape:
    """The sizes of the model. By default, it is SigLIP's base tower at 512 pixels with a decoder of
    0.2 billion weights."""

    layers: int = 12
    hidden: int = 1024
    feed_forward: int = 4096
    heads: int = 8
    tower_layers: int = 12
    tower_hidden: int = 768
    tower_feed_forward: int = 3072
    tower_heads: int = 12
    image_side: int = 512
    patch_side: int = 16
    rows_per_image: int = 256


def ensure_vision_model(path: Path, shape: VisionModelShape) -> Path:
    """The path of the model, which is written if it does not exist."""
    return written_once(path, lambda file: _write(file, shape))


@torch.no_grad()
def _write(path: Path, shape: VisionModelShape) -> None:
    """Writes the model. The embedding rows of end tokens and image tokens are zero, so that these
    tokens are unlikely."""
    torch.manual_seed(1)
    tokenizer = read_tokenizer(GGUFFile.open(DEMO_MODEL))
    ids = [tokenizer.token_to_id(token) for token in (*CONTROL_TOKENS, *IMAGE_TOKENS)]
    start, end, place = (tokenizer.token_to_id(token) for token in IMAGE_TOKENS)
    text = Gemma3TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=shape.hidden // shape.heads,
        query_pre_attn_scalar=shape.hidden // shape.heads,
        max_position_embeddings=CONTEXT_TOKENS,
        sliding_window=CONTEXT_TOKENS // 4,
    )
    vision = SiglipVisionConfig(
        hidden_size=shape.tower_hidden,
        intermediate_size=shape.tower_feed_forward,
        num_hidden_layers=shape.tower_layers,
        num_attention_heads=shape.tower_heads,
        image_size=shape.image_side,
        patch_size=shape.patch_side,
        vision_use_head=False,
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=shape.rows_per_image,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=place,
    )
    model = Gemma3ForConditionalGeneration(config)
    projection = model.model.multi_modal_projector.mm_input_projection_weight
    torch.nn.init.normal_(projection, std=projection.shape[0] ** -0.5)
    model.get_input_embeddings().weight[ids] = 0
    write_vision_model(path, model, tokenizer)
