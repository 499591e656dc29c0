"""Projector files of several families: stated and missing settings."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from model_zoo.chat.messages import Message
from model_zoo.chat_model import ChatModel
from model_zoo.convert.convert_folder import convert
from model_zoo.gguf.reader import GGUFFile
from model_zoo.images.resize import Filter
from model_zoo.models.llava.image_processor import Fit, LlavaProcessor
from model_zoo.models.mistral3.vision import EDGE_KEY
from model_zoo.registry import load
from runtime.errors import CaravanError, ConfigurationError, ModelFileError, UnsupportedModelError
from tests.families.vision_agreement import WIDE
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import rewrite

CPU = torch.device("cpu")
ASK = [Message("user", (WIDE, "What is this?"))]
# By name here: the row of the table.
ROWS = {
    "deepseekocr": "deepseekocr",
    "glm4v": "glm4v",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "kimivl": "kimivl",
    "lfm2": "lfm2",
    "lighton": "lighton",
    "llava": "llava_cropped",
    "llava_next": "llava_next",
    "minicpmv": "minicpmv",
    "moondream": "moondream",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """For each family the folder of a checkpoint and its converted files."""
    made = {}
    for family, row in ROWS.items():
        made[family] = tmp_path_factory.mktemp(family)
        VISION_MODELS[row].write(made[family])
    return made


def keys_of(folder: Path) -> dict[str, Any]:
    return dict(GGUFFile.open(folder / "mmproj-tiny.gguf").metadata)


def loaded(folder: Path, tmp_path: Path, **keys: Any) -> ChatModel:
    """The model with changed `keys` in the projector; None removes a key."""
    named = {"general.architecture": "clip"}
    changed = {f"clip.{name.replace('__', '.')}": value for name, value in keys.items()}
    other = rewrite(
        folder / "mmproj-tiny.gguf", tmp_path / "mmproj-other.gguf", keys=named | changed
    )
    return load(folder / "tiny.gguf", projector=other, device=CPU, dtype=torch.float32)


def converted(
    folder: Path,
    tmp_path: Path,
    processor: dict[str, Any] | None = None,
    *,
    part: str | None = None,
    **settings: Any,
) -> Path:
    """The projector from the checkpoint with other settings, which replace those of the image
    `processor` or are added to those of the model or its `part`."""
    changed, checkpoint = tmp_path / "changed", folder / "checkpoint"
    copytree(checkpoint, changed)
    if processor is not None:
        (changed / "preprocessor_config.json").write_text(json.dumps(processor))
    values = json.loads((checkpoint / "config.json").read_text())
    (values if part is None else values[part]).update(settings)
    (changed / "config.json").write_text(json.dumps(values))
    return convert(changed, tmp_path / "out.gguf", type="f32", flavour="llama.cpp")[1]


def refusal(kind: type[CaravanError], folder: Path, tmp_path: Path, **keys: Any) -> str:
    with pytest.raises(kind) as raised:
        loaded(folder, tmp_path, **keys)
    assert type(raised.value) is kind and "mmproj-other.gguf" in str(raised.value)
    return str(raised.value)


def test_a_text_file_that_does_not_rotate_by_rows_and_columns_is_refused(folders, tmp_path) -> None:
    """Converters once wrote files of GLM-4.5V without sections, which suffice for text."""
    text, projector = (folders["glm4v"] / name for name in ("tiny.gguf", "mmproj-tiny.gguf"))
    older = rewrite(text, tmp_path / "older.gguf", own_keys={"rope.dimension_sections": None})
    here = {"device": CPU, "dtype": torch.float32}
    assert load(text, projector=projector, **here).decoder.position_axes == 3
    with pytest.raises(ConfigurationError, match="states no rope sections") as raised:
        load(older, projector=projector, **here)
    assert str(older) in str(raised.value) and str(projector) in str(raised.value)


def test_converted_files_have_the_settings_of_the_processor(folders) -> None:
    assert keys_of(folders["idefics3"])["clip.vision.preproc_image_size"] == 108
    tiles = keys_of(folders["internvl"])
    assert [tiles[f"clip.vision.preproc_{end}_tiles"] for end in ("min", "max")] == [1, 6]
    assert keys_of(folders["llava"])["clip.vision.image_aspect_ratio"] == "square"


def test_idefics3_defaults_to_four_tiles_along_the_longest_edge(folders, tmp_path) -> None:
    """Idefics3-8B-Llama3 scales to 4 * 364, SmolVLM to 4 * 384, its smaller variants to 4 * 512."""
    model = loaded(folders["idefics3"], tmp_path, vision__preproc_image_size=None)
    processor = model.vision.processor
    assert processor.longest_edge == 4 * processor.side == 144
    assert model.prepare(ASK).images[0].grid == (2, 4)


def test_idefics3_cuts_the_tiles_that_its_file_states(folders, tmp_path) -> None:
    grids = [
        loaded(folders["idefics3"], tmp_path, vision__preproc_image_size=edge)
        .prepare(ASK)
        .images[0]
        .grid
        for edge in (36, 72, 144)
    ]
    assert grids == [(1, 1), (1, 2), (2, 4)]


def test_internvl_defaults_to_the_reference_numbers_of_tiles(folders, tmp_path) -> None:
    silent = {"vision__preproc_min_tiles": None, "vision__preproc_max_tiles": None}
    processor = loaded(folders["internvl"], tmp_path, **silent).vision.processor
    assert (processor.min_tiles, processor.max_tiles) == (1, 12)
    single = loaded(folders["internvl"], tmp_path, vision__preproc_max_tiles=1)
    assert single.prepare(ASK).images[0].grid == (1, 1)


@pytest.mark.parametrize(
    ("least", "most", "words"), [(7, 6, "more than"), (1, 129, "limit"), (1, 0, "1 or more")]
)
def test_internvl_refuses_invalid_numbers_of_tiles(folders, tmp_path, least, most, words) -> None:
    keys = {"vision__preproc_min_tiles": least, "vision__preproc_max_tiles": most}
    message = refusal(ModelFileError, folders["internvl"], tmp_path, **keys)
    assert words in message and "_tiles" in message


def test_deepseekocr_cuts_as_many_tiles_as_its_file_states(folders, tmp_path) -> None:
    """As files of llama.cpp do since Unlimited-OCR, which has more tiles."""
    keys = keys_of(folders["deepseekocr"])
    assert [keys[f"clip.vision.preproc_{end}_tiles"] for end in ("min", "max")] == [2, 9]
    silent = {"vision__preproc_min_tiles": None, "vision__preproc_max_tiles": None}
    stated = {"vision__preproc_min_tiles": 3, "vision__preproc_max_tiles": 4}
    found = [loaded(folders["deepseekocr"], tmp_path, **keys) for keys in (silent, stated)]
    tiles = [(each.vision.processor.min_tiles, each.vision.processor.max_tiles) for each in found]
    assert tiles == [(2, 9), (3, 4)]


def test_lfm2_means_the_settings_of_the_reference_where_its_file_states_none(
    folders, tmp_path
) -> None:
    names = "min_tiles max_tiles min_image_tokens max_image_tokens max_pixels_tolerance"
    silent = {f"vision__{name}": None for name in names.split()}
    processor = loaded(folders["lfm2"], tmp_path, **silent).vision.processor
    assert (processor.min_rows, processor.max_rows) == (64, 256)
    assert (processor.min_tiles, processor.max_tiles, processor.tolerance) == (2, 10, 2.0)
    other = loaded(folders["lfm2"], tmp_path, vision__image_resize_algo="bicubic")
    assert (processor.resample, other.vision.processor.resample) == (
        Filter.BILINEAR,
        Filter.BICUBIC,
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("min_tiles", 1, "has several tiles"),
        ("max_tiles", 11, "10 is the limit"),
        ("tile_size", 25, "not a multiple of 12"),
        ("max_pixels_tolerance", 1e9, "1024 is the limit"),
        ("image_resize_algo", "nearest", "bilinear, bicubic, lanczos are known"),
        ("min_image_tokens", 13, "more than"),
    ],
)
def test_lfm2_refuses_impossible_settings(folders, tmp_path, key, value, words) -> None:
    keys = {f"vision__{key}": value}
    message = refusal(ModelFileError, folders["lfm2"], tmp_path, **keys)
    assert words in message and f"clip.vision.{key}` is" in message


def test_lfm2_without_tokens_around_images_is_refused(folders, tmp_path) -> None:
    keys = {"vision__use_image_special_tokens": False}
    assert "around images" in refusal(UnsupportedModelError, folders["lfm2"], tmp_path, **keys)


@pytest.mark.parametrize(
    ("stated", "fit"), [("pad", Fit.PADDED), ("square", Fit.CROPPED), (None, Fit.PADDED)]
)
def test_llava_pads_or_crops_as_its_file_states_and_pads_by_default(
    folders, tmp_path, stated, fit
) -> None:
    model = loaded(folders["llava"], tmp_path, vision__image_aspect_ratio=stated)
    processor = model.vision.processor
    assert isinstance(processor, LlavaProcessor) and processor.fit is fit


def test_moondream_stretches_images(folders, tmp_path) -> None:
    model = loaded(folders["moondream"], tmp_path)
    assert model.vision.processor.fit is Fit.STRETCHED
    assert model.vision.placeholders.texts.spelled == "<image>\n\n"


def test_llava_with_tiles_but_without_canvases_is_refused(folders, tmp_path) -> None:
    message = refusal(
        UnsupportedModelError, folders["llava"], tmp_path, vision__image_aspect_ratio="anyres"
    )
    assert "`clip.vision.image_aspect_ratio` is anyres" in message


@pytest.mark.parametrize("aspect", ["anyres", None])
def test_llava_next_cuts_tiles_for_the_canvases_of_its_file(folders, tmp_path, aspect) -> None:
    keys = {
        "vision__image_grid_pinpoints": [36, 108, 72, 72],
        "vision__image_aspect_ratio": aspect,
        "vision__mm_patch_merge_type": None,
    }
    images = loaded(folders["llava_next"], tmp_path, **keys).prepare(ASK).images
    assert [len(image.pixels) for image in images] == [1 + 3]
    message = refusal(
        UnsupportedModelError,
        folders["llava_next"],
        tmp_path,
        vision__image_aspect_ratio="anyres_max_9",
    )
    assert "`clip.vision.image_aspect_ratio` is anyres_max_9" in message


def test_a_text_model_of_another_architecture_is_refused(folders) -> None:
    projector = folders["idefics3"] / "mmproj-tiny.gguf"
    with pytest.raises(ConfigurationError, match="idefics3 is for models of architecture llama,"):
        load(
            folders["internvl"] / "tiny.gguf", projector=projector, device=CPU, dtype=torch.float32
        )


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("llava", {"crop_size": {"height": 30, "width": 36}}, "`crop_size`"),
        ("llava", {"size": {"shortest_edge": 72}}, "`size`"),
        ("llava", {"do_center_crop": False}, "neither pads nor crops"),
        ("idefics3", {"max_image_size": {"longest_edge": 30}}, "`max_image_size`"),
        ("idefics3", {"do_image_splitting": False}, "`do_image_splitting`"),
        ("internvl", {"size": {"height": 448, "width": 448}}, "`size`"),
        ("lfm2", {"encoder_patch_size": 8}, "8 as `encoder_patch_size`"),
        ("lfm2", {"resample": 0}, "`resample` 0"),
        ("lfm2", {"max_tiles": 12}, "max_tiles` is 12; 10 is the limit"),
        ("lfm2", {"tile_size": 25}, "tile_size` is 25, which is not a multiple of 12"),
        ("lighton", {"size": {"height": 84, "width": 56}}, "bounds images to 84 x 56 pixels"),
    ],
)
def test_processors_that_files_cannot_describe_are_refused(
    folders, tmp_path, family, settings, words
) -> None:
    with pytest.raises(ModelFileError, match=words):
        converted(folders[family], tmp_path, settings)
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize(
    ("family", "part", "settings", "words"),
    [
        ("deepseekocr", "projector_config", {"projector_type": "mlp_gelu"}, "mean linear"),
        ("deepseekocr", "language_config", {"use_mla": True}, "True as `use_mla`"),
        ("deepseekocr", "vision_config", {"width": {}}, "has no `clip-l-14-224`"),
        ("glm4v", "text_config", {"rope_parameters": {"partial_rotary_factor": ""}}, "shape"),
        ("lfm2", None, {"downsample_factor": [2, 2]}, "invalid settings: TypeError"),
        ("llava_next", None, {"image_grid_pinpoints": []}, "number is needed"),
        ("lighton", "vision_config", {"rope_parameters": {"rope_theta": [1]}}, "TypeError"),
    ],
)
def test_settings_of_another_type_are_refused(
    folders, tmp_path, family, part, settings, words
) -> None:
    with pytest.raises(ModelFileError, match=words):
        converted(folders[family], tmp_path, part=part, **settings)


def test_lighton_bounds_both_sides_of_images_as_its_processor(folders, tmp_path) -> None:
    sides = {"height": 84, "width": 84}
    projector = converted(folders["lighton"], tmp_path, {"size": sides})
    assert GGUFFile.open(projector).metadata[f"clip.{EDGE_KEY}"] == 84


@pytest.mark.parametrize("layers", [[0, 2], [1, 12], [-9, 2], 9, [2, 1], []])
def test_llava_with_features_of_layers_that_it_does_not_have_is_refused(
    folders, tmp_path, layers
) -> None:
    with pytest.raises(ModelFileError, match="takes features from the layers"):
        converted(folders["llava"], tmp_path, vision_feature_layer=layers)


def test_lfm2_has_the_layers_up_to_the_one_that_gives_features(folders, tmp_path) -> None:
    """First checkpoints count a last layer that they do not store."""
    layers = keys_of(folders["lfm2"])["clip.vision.block_count"]
    config = json.loads((folders["lfm2"] / "checkpoint/config.json").read_text())
    counted = {"vision_config": {**config["vision_config"], "num_hidden_layers": layers + 1}}
    projector = converted(folders["lfm2"], tmp_path, vision_feature_layer=-2, **counted)
    assert GGUFFile.open(projector).metadata["clip.vision.block_count"] == layers
    load(folders["lfm2"] / "tiny.gguf", projector=projector, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("layer", "words"),
    [(-2, "does not know: .*layers"), (-9, "from the layer -9"), (1, "from the layer 1")],
)
def test_lfm2_with_features_of_another_layer_than_the_last_stored_one_is_refused(
    folders, tmp_path, layer, words
) -> None:
    """`transformers` computes all stored layers, the authors' first code did not."""
    with pytest.raises(ModelFileError, match=words):
        converted(folders["lfm2"], tmp_path, vision_feature_layer=layer)


def test_kimivl_takes_the_patches_of_its_file_or_those_of_the_first_checkpoints(
    folders, tmp_path
) -> None:
    taken = [
        loaded(folders["kimivl"], tmp_path, vision__image_max_pixels=area).vision.processor.patches
        for area in (None, 16384 * 28**2, 1)
    ]
    assert taken == [4096, 16384, 1]


def test_minicpmv_marks_slices_as_its_first_version_if_the_file_states_none(
    folders, tmp_path
) -> None:
    shown = [
        loaded(folders["minicpmv"], tmp_path, minicpmv_version=version).prepare(ASK).tokens
        for version in (None, 2, 3)
    ]
    assert shown[0] == shown[1] != shown[2]


def test_minicpmv_of_unknown_versions_is_refused(folders, tmp_path) -> None:
    message = refusal(UnsupportedModelError, folders["minicpmv"], tmp_path, minicpmv_version=1)
    assert "`clip.minicpmv_version` is 1" in message
