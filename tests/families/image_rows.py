"""Tiny models with cross-attention to images, and their logits in `transformers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MllamaForCausalLM, MllamaTextConfig
from transformers.models.mllama import modeling_mllama, processing_mllama

from runtime.engine.request import ImageSpan
from runtime.vision.encoder import PreparedImage
from tests.gguf_files import rewrite
from tests.tiny_models import write_tiny
from tests.unit.runtime.vision.fake_tower import PretendTower, features_of, picture

TILES, TILE_ROWS = 3, 5  # patches of 14 in a square of 28, and one row more
IMAGE_ROWS = TILES * TILE_ROWS
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "cross_attention_layers": [1, 3],
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


class Maker:
    """`transformers` has no Auto class for the text model alone."""

    from_config = MllamaForCausalLM._from_config


# The size of images, which the cache of the layers that attend to them depends on.
VISION_KEYS = {"vision.image_size": 28, "vision.max_num_tiles": TILES}
OPTIONS = {"flavour": "ollama", "maker": Maker}


def tiny_config(**changes: Any) -> MllamaTextConfig:
    return MllamaTextConfig(**(SIZES | changes))


def write_with_image_size(path: Path, config: MllamaTextConfig) -> MllamaForCausalLM:
    """Write a file that states the size of images but has no tower; returns the twin."""
    plain = path.with_name("plain.gguf")
    twin = write_tiny(plain, config, **OPTIONS)
    rewrite(plain, path, own_keys=VISION_KEYS)
    return twin


@dataclass(frozen=True)
class Picture:
    """An image at a position of the text with `tiles` tiles; the rest of TILES is padding."""

    position: int
    tiles: int
    digest: bytes

    @property
    def span(self) -> ImageSpan:
        rows, padding = self.tiles * TILE_ROWS, (TILES - self.tiles) * TILE_ROWS
        return ImageSpan(self.position, 1, False, self.digest, rows, padding)

    @property
    def prepared(self) -> PreparedImage:
        """As `picture_tower` encodes it."""
        return picture(int.from_bytes(self.digest, "big"), IMAGE_ROWS)

    @property
    def features(self) -> Tensor:
        """[IMAGE_ROWS, hidden], a function of the digest."""
        return features_of(self.digest, IMAGE_ROWS, SIZES["hidden_size"])


def picture_tower() -> PretendTower:
    return PretendTower(rows=IMAGE_ROWS, width=SIZES["hidden_size"])


def logits_of_twin(
    twin: MllamaForCausalLM, tokens: list[int], pictures: Sequence[Picture]
) -> Tensor:
    """[tokens, vocabulary], with the masks that the model's own processor makes.

    At the pictures' positions `tokens` has the token of images, the first behind the vocabulary.
    """
    if not pictures:
        with torch.inference_mode():
            return twin(torch.tensor([tokens])).logits[0]
    sparse = processing_mllama.get_cross_attention_token_mask(tokens, twin.config.vocab_size)
    dense = processing_mllama.convert_sparse_cross_attention_mask_to_dense(
        [sparse], [[picture.tiles for picture in pictures]], TILES, len(tokens)
    )
    mask, rows_with_images = modeling_mllama._prepare_cross_attention_mask(
        torch.from_numpy(dense), num_vision_tokens=TILE_ROWS, dtype=torch.float32
    )
    with torch.inference_mode():
        return twin(
            torch.tensor([tokens]),
            cross_attention_states=torch.cat([p.features for p in pictures]).unsqueeze(0),
            cross_attention_mask=mask,
            full_text_row_masked_out_mask=rows_with_images,
        ).logits[0]
