"""Tiny text models with images in prompts but without towers, and logits of `transformers`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    Qwen3Config,
    Qwen3VLTextConfig,
)
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLModel,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from model_zoo.chat_model import ChatModel
from model_zoo.layers.rope import axes_of
from model_zoo.layers.stack import LayerStack
from model_zoo.registry import load
from runtime.engine.request import ImageSpan
from runtime.vision.encoder import PreparedImage
from tests.families.image_rows import (
    IMAGE_ROWS,
    TILE_ROWS,
    Picture,
    logits_of_twin,
    tiny_config,
    write_with_image_size,
)
from tests.tiny_models import write_tiny
from tests.unit.runtime.vision.fake_tower import PretendTower, features_of, picture

HIDDEN, FREQUENCIES, WINDOW, DEEP = 64, 8, 11, 2
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
BASE = {"rope_type": "default", "rope_theta": 10000.0}
# Rows and columns of the features of each image, by its number.
GRIDS = {1: (2, 3), 2: (5, 2), 3: (3, 3), 4: (1, 4)}
LARGEST = max(rows * columns for rows, columns in GRIDS.values())
# Of images that layers attend to: the tiles of each, and how many a request may have.
TILES_OF = {1: 3, 2: 1, 3: 2, 4: 3}
MOST_IMAGES = 4

Logits = Callable[[Sequence[int], Sequence[ImageSpan]], Tensor]


@dataclass(frozen=True)
class ImageTextModel:
    """`logits` of `transformers`: tokens and images -> [tokens, vocabulary]. `image_token`: where
    layers attend to images beside the text, the only token of one in it."""

    model: ChatModel
    logits: Logits
    width: int
    whole: bool = False
    image_token: int | None = None

    @property
    def rows(self) -> int:
        """Rows of features of the largest image."""
        return LARGEST if self.image_token is None else IMAGE_ROWS

    @property
    def rows_at_once(self) -> int:
        """Rows of the images that a request may need in one step."""
        return self.rows if self.image_token is None else self.rows * MOST_IMAGES

    def tower(self) -> PretendTower:
        return PretendTower(rows=self.rows, width=self.width, whole=self.rows * self.whole)

    def image(self, number: int) -> PreparedImage:
        rows, columns = GRIDS[number]
        return picture(number, rows * columns if self.image_token is None else IMAGE_ROWS)

    def span(self, start: int, number: int) -> ImageSpan:
        image = self.image(number)
        if self.image_token is not None:
            return Picture(start, TILES_OF[number], image.digest).span
        grid = GRIDS[number] if self.model.decoder.position_axes > 1 else None
        return ImageSpan(start, image.rows, self.whole, image.digest, grid=grid)


def gemma3(folder: Path) -> ImageTextModel:
    """Rows of an image attend to each other in both directions, in local and in global layers."""
    config = Gemma3TextConfig(
        **(SIZES | {"query_pre_attn_scalar": 16}), sliding_window=WINDOW, sliding_window_pattern=3
    )
    path = folder / "gemma3.gguf"
    twin = write_tiny(path, config)

    def logits(tokens: Sequence[int], images: Sequence[ImageSpan]) -> Tensor:
        embedded = _embedded(twin.model, tokens, images, HIDDEN)[:, :, :HIDDEN]
        blocks = torch.full((1, len(tokens)), -1)
        for number, image in enumerate(images):
            blocks[:, image.start : image.end] = number
        masks = create_masks_for_vision_model(
            twin.config, embedded, None, None, None, block_sequence_ids=blocks
        )
        return twin.lm_head(twin.model(inputs_embeds=embedded, attention_mask=masks)[0])[0]

    model = load(path, device=torch.device("cpu"), dtype=torch.float32)
    return ImageTextModel(model, logits, HIDDEN, whole=True)


def qwen3vl(folder: Path) -> ImageTextModel:
    """Positions have three axes, interleaved, and the first layers add parts of the features.

    The weights of a text model in one with vision, and a file of the text model."""
    sections, path = [4, 2, 2], folder / "qwen3.gguf"
    twin = write_tiny(path, Qwen3Config(**SIZES, rope_parameters=BASE))
    config = Qwen3VLTextConfig(**SIZES, rope_parameters=BASE | {"mrope_section": sections})
    config.vocab_size, config._attn_implementation = twin.config.vocab_size, "eager"
    vision = Qwen3VLTextModel(config).eval()
    vision.load_state_dict(twin.model.state_dict())
    width = (1 + DEEP) * HIDDEN

    def logits(tokens: Sequence[int], images: Sequence[ImageSpan]) -> Tensor:
        rows = _embedded(vision, tokens, images, width)
        mask = torch.zeros(1, len(tokens), dtype=torch.bool)
        for image in images:
            mask[:, image.start : image.end] = True
        parts = rows[mask].split(HIDDEN, dim=1)[1:]
        more = {"visual_pos_masks": mask, "deepstack_visual_embeds": list(parts)}
        places = _rope_index(tokens, images)
        states = vision(inputs_embeds=rows[:, :, :HIDDEN], position_ids=places, **more)[0]
        return twin.lm_head(states)[0]

    model = load(path, device=torch.device("cpu"), dtype=torch.float32)
    _rotate_by(model, axes_of(sections, FREQUENCIES, interleaved=True))
    return ImageTextModel(model, logits, width)


def mllama(folder: Path) -> ImageTextModel:
    """Layers attend to the images before each position, whose rows are no positions of the text."""
    path = folder / "mllama.gguf"
    twin = write_with_image_size(path, tiny_config())

    def logits(tokens: Sequence[int], images: Sequence[ImageSpan]) -> Tensor:
        pictures = [Picture(i.start, i.cross_rows // TILE_ROWS, i.digest) for i in images]
        return logits_of_twin(twin, list(tokens), pictures)

    model = load(path, device=torch.device("cpu"), dtype=torch.float32)
    return ImageTextModel(model, logits, HIDDEN, image_token=twin.config.vocab_size)


MODELS: Mapping[str, Callable[[Path], ImageTextModel]] = {
    "gemma3": gemma3,
    "qwen3vl": qwen3vl,
    "mllama": mllama,
}


def _rotate_by(model: ChatModel, axes: Tensor) -> None:
    """Make a text model rotate its heads by time, row and column."""
    decoder = model.decoder
    layers = decoder._layers._layers
    rotary = replace(layers[0].rotary, axes=axes, position_axes=3)
    decoder._layers = LayerStack([replace(layer, rotary=rotary) for layer in layers])


def _embedded(model, tokens: Sequence[int], images: Sequence[ImageSpan], width: int) -> Tensor:
    """[1, tokens, width]: embeddings padded with zeros, or the features of an image."""
    rows = torch.zeros(1, len(tokens), width)
    rows[:, :, :HIDDEN] = model.embed_tokens(torch.tensor([tokens]))
    for image in images:
        features = features_of(image.digest, image.length, width)
        rows[0, image.start : image.end] = features
    return rows


def _rope_index(tokens: Sequence[int], images: Sequence[ImageSpan]) -> Tensor:
    """[3, 1, tokens], as the whole model computes it."""
    config = SimpleNamespace(spatial_merge_size=1, tokens_per_second=1)
    index = SimpleNamespace(
        config=SimpleNamespace(vision_config=config),
        get_vision_position_ids=partial(Qwen2_5_VLModel.get_vision_position_ids, None),
    )
    kinds = torch.zeros(1, len(tokens), dtype=torch.int32)
    for image in images:
        kinds[:, image.start : image.end] = 1
    grids = torch.tensor([(1, *image.grid) for image in images if image.grid] or [(0, 0, 0)])
    places, _ = Qwen2_5_VLModel.get_rope_index(index, torch.tensor([tokens]), kinds, grids)
    return places
