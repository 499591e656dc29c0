"""Features of Llama 3.2 Vision's tower against `transformers`, on tiny random models."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MllamaConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mllama.modeling_mllama import MllamaVisionEncoder

from model_zoo.models.mllama.image_processor import aspect_ratio_id, tile_mask
from model_zoo.models.mllama.vision import build_tower
from runtime.errors import ModelFileError, UnsupportedModelError
from tests.fuzz.pieces import take_apart
from tests.gguf_files import matrices, rewrite
from tests.parity.towers import (
    VisionModel,
    check_each_alone,
    check_features,
    check_limits,
    encoded,
    load_tower,
    make_eyes,
    random_pixels,
    worst,
)

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "cross_attention_layers": [1],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def config(kept: tuple[int, ...] = (0, 2), **changes) -> MllamaConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    sizes |= {"num_global_layers": 2, "attention_heads": 3, "image_size": 24, "patch_size": 6}
    sizes |= {"intermediate_layers_indices": list(kept)}
    sizes |= {"vision_output_dim": 48 * (1 + len(kept))}
    return MllamaConfig(text_config=TEXT, vision_config=sizes | changes)


CONFIGS = {
    "plain": config(),
    "other_states": config(kept=(1,), norm_eps=1e-2),
    "another_side": config(image_size=33),
}


def states_before_layers(self, hidden_states, attention_mask=None):
    """As in Meta's code, and in `transformers` before a regression."""
    states = ()
    for layer in self.layers:
        states = (*states, hidden_states)
        hidden_states = layer(hidden_states=hidden_states, attention_mask=attention_mask)
    return BaseModelOutput(last_hidden_state=hidden_states, hidden_states=states)


@pytest.fixture(scope="module", params=CONFIGS)
def vision(request, tmp_path_factory) -> VisionModel:
    folder = tmp_path_factory.mktemp("models")
    return make_eyes(build_tower, CONFIGS[request.param], folder, flavour="ollama")


def tiles_of(vision: VisionModel, images: int) -> Tensor:
    """Slots without a tile hold noise, too: features may not depend on them by accident."""
    return random_pixels(images, *vision.tower.largest().pixels.shape)


def expected(vision: VisionModel, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    slots = pixels.shape[1]
    number = torch.full((len(pixels), 1), aspect_ratio_id(grid, slots))
    mask = tile_mask(grid, slots).long().expand(len(pixels), 1, -1)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(MllamaVisionEncoder, "forward", states_before_layers)
        states = vision.twin.model.vision_model(pixels.unsqueeze(1), number, mask)
        features = vision.twin.model.multi_modal_projector(states.last_hidden_state)
    return features.flatten(1, -2)


GRIDS = [(1, 1), (1, 3), (2, 1), (2, 2), (4, 1)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("images", [1, 2])
def test_features_agree(vision, images, grid) -> None:
    pixels = tiles_of(vision, images)
    check_features(vision, pixels, expected(vision, pixels, grid), grid)


def test_declared_limits_hold(vision) -> None:
    for images in (1, 3):
        check_limits(vision.tower, images)


def test_features_do_not_depend_on_the_other_images(vision) -> None:
    check_each_alone(vision, tiles_of(vision, 3), (1, 2))


def test_lying_and_standing_grids_have_places_of_their_own(vision) -> None:
    pixels = tiles_of(vision, 1)
    lying, standing = (encoded(vision.tower, pixels, grid) for grid in ((1, 2), (2, 1)))
    assert worst(lying, standing) > 1e-2


def test_states_of_layers_that_are_not_there_are_refused(tmp_path) -> None:
    vision = make_eyes(build_tower, config(), tmp_path, flavour="ollama")
    keys = {
        "general.architecture": "mllama",
        "mllama.vision.intermediate_layers_indices": [0, 3],
    }
    path = rewrite(vision.path, tmp_path / "changed.gguf", keys=keys)
    with pytest.raises(ModelFileError, match="of 3 layers"):
        load_tower(build_tower, path)


def test_a_file_that_keeps_the_states_of_no_layer_is_refused(tmp_path) -> None:
    """Its projection is as narrow as that needs, so that nothing else is wrong with it."""
    vision = make_eyes(build_tower, config(), tmp_path, flavour="ollama")
    wide = matrices(vision.path)["mm.0.weight"]
    tensors = {"mm.0.weight": np.ascontiguousarray(wide[:, : wide.shape[1] // 3])}
    keys = {"general.architecture": "mllama"}
    path = rewrite(vision.path, tmp_path / "changed.gguf", keys=keys, tensors=tensors)
    pieces = take_apart(path.read_bytes())
    assert pieces is not None
    kept = b"mllama.vision.intermediate_layers_indices"
    next(key for key in pieces.keys if key.name == kept).items = []
    path.write_bytes(pieces.bytes())
    with pytest.raises(ModelFileError, match="intermediate_layers_indices` is empty"):
        load_tower(build_tower, path)


def test_grids_that_files_cannot_list_are_refused(tmp_path) -> None:
    odd = config(supported_aspect_ratios=[[1, 1], [2, 1]], max_num_tiles=2)
    with pytest.raises(UnsupportedModelError, match="all grids of at most 2 tiles"):
        make_eyes(build_tower, odd, tmp_path, flavour="ollama")
