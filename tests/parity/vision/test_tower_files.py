"""Files of vision towers with older names, other layouts, or contradictions."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from model_zoo.convert.convert_folder import convert
from model_zoo.layers.vision.clamped import BOUNDS, MATRICES
from model_zoo.models.deepseekocr.vision_2 import IMAGE_END, DeepseekOCR2Tower
from model_zoo.models.llava.vision import CLIP_LAYERS, FEATURE_KEY
from model_zoo.models.mistral3.vision import PROJECTOR_EPS
from runtime.errors import ModelFileError, UnsupportedModelError
from runtime.vision.encoder import LocalEncoder, no_pause
from tests.families.deepseekocr2_families import save_deepseekocr2
from tests.families.text_family import changed
from tests.families.tower_families import TOWERS
from tests.families.towers import TOLERANCE, TowerPair, check_limits, encoded, load_tower, worst
from tests.families.towers import random_pixels as random
from tests.families.vision_configs import SIDE
from tests.fuzz.parsed_file import parse
from tests.gguf_files import matrices
from tests.memory_profile import peak_bytes, recorded_memory
from tests.tiny_models import write_tiny_folder


def check_same(family: str, pair: TowerPair, path: Path) -> None:
    """The other file gives the same features to the bit."""
    row = TOWERS[family]
    shape = row.shapes[-1]
    pixels, grid = row.pixels(pair, 1, shape), row.grid(shape)
    features = encoded(load_tower(row.build, path), pixels, grid)
    assert torch.equal(features, encoded(pair.tower, pixels, grid))


def check_refused(family: str, path: Path, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        load_tower(TOWERS[family].build, path)


def test_deepseekocr_of_llama_cpps_converter_agrees(tmp_path) -> None:
    """It states another epsilon, and keeps the embedding of patches that CLIP does not get."""
    pair = TOWERS["deepseekocr"].write(tmp_path)
    unused = {"v.patch_embd.weight": np.ones((32, 3, 14, 14), np.float32)}
    keys = {"vision.attention.layer_norm_epsilon": 1e-2, "vision.feed_forward_length": 8}
    check_same("deepseekocr", pair, changed(pair.path, keys, unused))


@pytest.mark.parametrize(
    ("keys", "cut", "words"),
    [
        ({}, "v.position_embd.weight", "means a square and one more place"),
        ({"vision.embedding_length": 30}, "", "vision.embedding_length` is 30, where rows have 32"),
        ({"vision.sam.head_count": 5}, "", "vision.sam.head_count` is 5, which does not divide 24"),
        ({}, "v.sam.pos_embd.weight", "v.sam.pos_embd.weight"),
        ({}, "v.sam.blk.0.attn.pos_w.weight", "v.sam.blk.0.attn.pos_w.weight is 10 x 12, not 11"),
    ],
)
def test_deepseekocr_with_contradictory_sizes_is_refused(tmp_path, keys, cut, words) -> None:
    path = TOWERS["deepseekocr"].write(tmp_path).path
    shorter = {cut: np.ascontiguousarray(matrices(path)[cut][..., :-1, :])} if cut else {}
    check_refused("deepseekocr", changed(path, keys, shorter), ModelFileError, words)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("v.sam.patch_embd.weight", (24, 3, 1, 257), "means patches"),
        ("v.sam.pos_embd.weight", (1, 1, 4097, 24), "means images of 16,388 pixels"),
        ("v.sam.pos_embd.weight", (2, 24), "v.sam.pos_embd.weight is .*not 2 x 2 x 24"),
        ("v.position_embd.weight", (1, 32), "means a square and one more place"),
    ],
)
def test_deepseekocr_of_impossible_sizes_is_refused(tmp_path, name, shape, words) -> None:
    path = TOWERS["deepseekocr"].write(tmp_path).path
    table = np.ones(shape, np.float32)
    check_refused("deepseekocr", changed(path, tensors={name: table}), ModelFileError, words)


def test_deepseekocr2_of_the_authors_checkpoint_agrees(tmp_path) -> None:
    pair, folder = TOWERS["deepseekocr2"].write(tmp_path), tmp_path / "authors"
    folder.mkdir()
    authors = replace(TOWERS["deepseekocr2"], save=save_deepseekocr2).write(folder)
    check_same("deepseekocr2", pair, authors.path)


def test_deepseekocr2_of_llama_cpps_converter_agrees(tmp_path) -> None:
    """The row behind an image has one more dimension."""
    pair = TOWERS["deepseekocr2"].write(tmp_path)
    end = matrices(pair.path)[IMAGE_END][None]
    check_same("deepseekocr2", pair, changed(pair.path, tensors={IMAGE_END: end}))


@pytest.mark.parametrize(
    ("keys", "cut", "words"),
    [
        ({"vision.attention.head_count_kv": 3}, "", "is 3, which does not divide 4 heads"),
        ({"vision.attention.head_count_kv": None}, "", "head_count_kv"),
        ({"vision.embedding_length": 60}, "", "is 60, where rows have 64"),
        ({}, "v.resample_query_768.weight", "resample_query_768.weight is .* 63, not .* 64"),
    ],
)
def test_deepseekocr2_with_contradictory_sizes_is_refused(tmp_path, keys, cut, words) -> None:
    path = TOWERS["deepseekocr2"].write(tmp_path).path
    narrower = {cut: np.ascontiguousarray(matrices(path)[cut][:, :-1])} if cut else {}
    check_refused("deepseekocr2", changed(path, keys, narrower), ModelFileError, words)


def test_deepseekocr2_counts_the_mask_of_many_queries(tmp_path) -> None:
    """It has the square of the rows and queries of a view."""
    tower = TOWERS["deepseekocr2"].write(tmp_path).tower
    assert isinstance(tower, DeepseekOCR2Tower)
    rows, queries = torch.zeros(1, 60, 64), torch.zeros(1300, 64)
    with torch.inference_mode(), recorded_memory() as recorded:
        tower._reader(rows, queries, no_pause)
    assert 0 < peak_bytes(recorded) <= tower._reader.nbytes(1360, 1360)


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("exaone45", {"vision.attention.head_count_kv": 3}, "is 3, which does not divide 4 heads"),
        (
            "gemma4_unified",
            {"vision.image_max_pixels": 301 * 144},
            "allows 301 rows, which is more than",
        ),
        ("step3vl", {"vision.image_size": 60}, "is 60; it must be a multiple of 16"),
        ("step3vl", {"vision.projector.scale_factor": 2}, "is 2; it must be 4"),
    ],
)
def test_contradictory_settings_are_refused(tmp_path, family, keys, words) -> None:
    path = TOWERS[family].write(tmp_path).path
    check_refused(family, changed(path, keys), ModelFileError, words)


def test_gemma3_with_exchanged_names_of_the_feed_forward_agrees(tmp_path) -> None:
    """As older converters named the two matrices of a layer."""
    pair = TOWERS["gemma3"].write(tmp_path)
    tensors = {n: a for n, a in matrices(pair.path).items() if "ffn_up" in n or "ffn_down" in n}
    exchanged = {}
    for name, array in tensors.items():
        up = "ffn_up" in name
        exchanged[name.replace(*(("up", "down") if up else ("down", "up")))] = array
    check_same("gemma3", pair, changed(pair.path, tensors=dict.fromkeys(tensors) | exchanged))


def test_gemma3_with_ollamas_older_prefix_and_key_agrees(tmp_path) -> None:
    pair = TOWERS["gemma3"].write(tmp_path, flavour="ollama")
    tensors = {n: a for n, a in matrices(pair.path).items() if n.startswith("v.")}
    older = {f"vision.{name.removeprefix('v.')}": array for name, array in tensors.items()}
    keys = {
        "mm.tokens_per_image": None,
        "mm_tokens_per_image": 9,
        "vision.attention.layer_norm_epsilon": None,
    }
    check_same("gemma3", pair, changed(pair.path, keys, dict.fromkeys(tensors) | older))


def test_gemma3_computes_all_rows_of_an_image_at_once(tmp_path) -> None:
    limits = TOWERS["gemma3"].write(tmp_path).tower.limits
    assert limits.whole == limits.rows


@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_smaller_copies_agree(tmp_path, type: str) -> None:
    """Towers are never quantised to blocks; halves round by a part in two thousand."""
    row = TOWERS["gemma3"]
    pair = row.write(tmp_path, type=type)
    pixels = row.pixels(pair, 2, None)
    difference = worst(encoded(pair.tower, pixels), row.expected(pair, pixels, None))
    assert 0 < difference <= 1e-2


def test_gemma4_with_a_prime_number_of_rows_is_encoded_at_start(tmp_path) -> None:
    pair = TOWERS["gemma4"].write(tmp_path, flavour="ollama")
    unit = 3 * 4
    path = changed(pair.path, {"vision.image_max_pixels": 53 * unit**2})
    tower = load_tower(TOWERS["gemma4"].build, path)
    assert tower.limits.largest.grid == (1, 53)
    check_limits(tower, images=1)
    encoder = LocalEncoder(tower, device=torch.device("cpu"), weight_bytes=0)
    encoder.warm_up()
    encoder.close()


def test_gemma4_without_bounds_computes_other_features(tmp_path) -> None:
    """Shows that the bounds of the tiny models clip values."""
    row = TOWERS["gemma4"]
    pair = row.write(tmp_path, "clipped")
    free = {name: None for name in matrices(pair.path) if name.endswith(BOUNDS)}
    assert len(free) == 2 * len(MATRICES) * len(BOUNDS)
    tower = load_tower(row.build, changed(pair.path, tensors=free))
    pixels = row.pixels(pair, 1, (2, 3))
    features = encoded(tower, pixels, (2, 3))
    assert worst(features, encoded(pair.tower, pixels, (2, 3))) > 0.1


def test_gemma4_with_all_bounds_in_one_tensor_agrees(tmp_path) -> None:
    """As in Ollama's first files; the last four are the projection's."""
    pair = TOWERS["gemma4"].write(tmp_path, "clipped", flavour="ollama")
    stored = matrices(pair.path)
    names = [f"v.blk.{layer}.{m}.{b}" for layer in range(2) for m in MATRICES for b in BOUNDS]
    wide = np.array([-3.4e38, 3.4e38] * 2, np.float32)
    listed = np.concatenate([*(stored[name] for name in names), wide])
    tensors = {"v.clamp_data": listed, **dict.fromkeys(names)}
    check_same("gemma4", pair, changed(pair.path, tensors=tensors))


def test_audio_tensors_of_gemma4_are_ignored(tmp_path) -> None:
    pair = TOWERS["gemma4"].write(tmp_path)
    names = ("a.blk.0.attn_q.weight", "mm.a.fc.weight")
    tensors = {name: np.ones((2, 2), np.float32) for name in names}
    check_same("gemma4", pair, changed(pair.path, tensors=tensors))


def test_gemma4_with_more_rows_than_positions_is_refused(tmp_path) -> None:
    with pytest.raises(ModelFileError, match="allows 280 rows, which is more than"):
        TOWERS["gemma4"].write(tmp_path, position_embedding_size=839)


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        ("plain", "v.norm_embd.weight"),
        ("plain", "v.position_embd.weight"),
        ("glm_ocr", "v.blk.1.attn_q_norm.weight"),
    ],
)
def test_glm_files_need_positions_or_norms_of_all_heads(tmp_path, config, lost) -> None:
    path = changed(TOWERS["glm4v"].write(tmp_path, config).path, tensors={lost: None})
    check_refused("glm4v", path, ModelFileError, re.escape(lost))


def test_a_table_of_places_that_form_no_square_is_refused(tmp_path) -> None:
    path = TOWERS["lfm2"].write(tmp_path).path
    name = "v.position_embd.weight"
    path = changed(path, tensors={name: matrices(path)[name][:-1]})
    check_refused("lfm2", path, ModelFileError, "places, which is not a square number")


def test_internvl_with_leading_dimensions_of_one_agrees(tmp_path) -> None:
    pair = TOWERS["internvl"].write(tmp_path)
    tables = {
        name: array.reshape(1, -1, array.shape[-1])
        for name, array in matrices(pair.path).items()
        if name in ("v.class_embd", "v.position_embd.weight")
    }
    assert len(tables) == 2
    check_same("internvl", pair, changed(pair.path, tensors=tables))


def test_llama4_with_another_name_of_the_second_norm_agrees(tmp_path) -> None:
    pair = TOWERS["llama4"].write(tmp_path)
    norms = {name: array for name, array in matrices(pair.path).items() if ".ln2." in name}
    renamed = {name.replace(".ln2.", ".attn_post_norm."): array for name, array in norms.items()}
    check_same("llama4", pair, changed(pair.path, tensors=dict.fromkeys(norms) | renamed))


def test_llama4_tiles_that_cannot_be_shuffled_are_refused(tmp_path) -> None:
    pair = TOWERS["llama4"].write(tmp_path, flavour="ollama")
    path = changed(pair.path, {"vision.pixel_shuffle_ratio": 0.25})
    check_refused("llama4", path, ModelFileError, "6 patches across, which 4 does not divide")


def llava_of(path: Path, layers: list[int] | None = None, *, only: int | None = None) -> Path:
    """A copy that projects features of `layers` and has `only` so many of its layers."""
    keys: dict[str, Any] = {FEATURE_KEY: layers}
    tensors = {}
    if only is not None:
        keys["vision.block_count"] = only
        kept = tuple(f"v.blk.{layer}." for layer in range(only))
        names = [name for name in matrices(path) if name.startswith("v.blk.")]
        tensors = {name: None for name in names if not name.startswith(kept)}
    return changed(path, keys, tensors)


@pytest.mark.parametrize(
    ("layers", "only"), [(CLIP_LAYERS, None), (CLIP_LAYERS, CLIP_LAYERS - 1), (3, 2)]
)
def test_llava_projects_the_last_layer_but_one_by_default(tmp_path, layers, only) -> None:
    """Older converters left the last layer out; other files have the layers that are computed."""
    pair = TOWERS["llava"].write(tmp_path, num_hidden_layers=layers)
    check_same("llava", pair, llava_of(pair.path, only=only))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([4], "is 4, of 3 layers"),
        ([0], "is 0, of 3 layers"),
        ([2, 1], "not layers in ascending order"),
    ],
)
def test_llava_with_features_of_impossible_layers_is_refused(tmp_path, layers, words) -> None:
    path = TOWERS["llava"].write(tmp_path).path
    check_refused("llava", llava_of(path, layers), ModelFileError, words)


def test_granite_agrees_where_its_file_states_another_activation_and_has_a_head(tmp_path) -> None:
    """As llama.cpp's converter writes it."""
    pair = TOWERS["llava_next"].write(tmp_path, "granite")
    head = {"v.head.probe": np.ones((1, 48), np.float32)}
    check_same("llava_next", pair, changed(pair.path, {"use_gelu": False}, head))


def test_llava_without_a_type_of_projector_agrees(tmp_path) -> None:
    pair = TOWERS["llava"].write(tmp_path)
    check_same("llava", pair, changed(pair.path, {"projector_type": None}))


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_llava_as_its_first_converter_wrote_it_agrees(tmp_path, family) -> None:
    """As the projectors of LLaVA 1.5 and 1.6, BakLLaVA, and LLaVA Llama 3 and Phi 3 in Ollama's
    library: without the layer that is not computed and the last norm, and with the names of the
    feed-forward's matrices exchanged."""
    pair = TOWERS[family].write(tmp_path)
    stored = matrices(pair.path)
    unused = [name for name in stored if name.startswith(("v.blk.2.", "v.post_ln."))]
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    turned = {
        name.replace(old, new): array
        for name, array in stored.items()
        for old, new in names.items()
        if f".{old}." in name and name not in unused
    }
    keys = {
        "has_text_encoder": False,
        "has_llava_projector": True,
        "projector_type": None,
        "use_gelu": False,
        "vision.block_count": 2,
        "vision.feature_layer": None,
        "vision.projection_dim": 768,
    }
    if family == "llava_next":
        keys |= {
            "vision.image_crop_resolution": 224,
            "vision.image_split_resolution": 224,
            "vision.mm_projector_type": "mlp2x_gelu",
        }
    check_same(family, pair, changed(pair.path, keys, dict.fromkeys(unused) | turned))


@pytest.mark.parametrize("merged", ["flat", "spatial"])
def test_llava_next_with_rows_merged_otherwise_is_refused(tmp_path, merged) -> None:
    path = changed(
        TOWERS["llava_next"].write(tmp_path).path, {"vision.mm_patch_merge_type": merged}
    )
    words = f"`.*mm_patch_merge_type` is {merged};"
    check_refused("llava_next", path, UnsupportedModelError, words)


@pytest.mark.parametrize(
    "sides", [[36], [36, 72, 72], [36, 40], [0, 36], [36 * 9, 36 * 9], [36] * 258], ids=str
)
def test_llava_next_with_impossible_canvases_is_refused(tmp_path, sides) -> None:
    path = changed(
        TOWERS["llava_next"].write(tmp_path).path, {"vision.image_grid_pinpoints": sides}
    )
    check_refused("llava_next", path, ModelFileError, "image_grid_pinpoints")


def test_llava_next_files_state_canvases_in_the_order_of_the_checkpoint(tmp_path) -> None:
    pair = TOWERS["llava_next"].write(tmp_path, canvases=[(1, 2), (3, 1)])
    assert pair.tower.images.canvases == ((SIDE, 2 * SIDE), (3 * SIDE, SIDE))
    newline = torch.from_numpy(matrices(pair.path)["model.image_newline"].copy())
    assert torch.equal(newline, pair.twin.model.image_newline)


def test_mistral3_image_of_several_slabs_agrees(tmp_path) -> None:
    row = TOWERS["mistral3"]
    pair = row.write(tmp_path, patch_size=2)
    pixels = random(1, 3, 80, 72)
    expected = row.expected(pair, pixels, (40, 36))
    assert worst(encoded(pair.tower, pixels), expected) <= TOLERANCE


def test_mistral3_takes_the_line_break_from_the_text_model(tmp_path) -> None:
    """llama.cpp reads its row from the projector; here it is a token of the prompt."""
    row, folder, path = TOWERS["mistral3"], tmp_path / "folder", tmp_path / "tiny.gguf"
    twin = write_tiny_folder(folder, row.make(), padding_rows=1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("[IMG_BREAK]", special=True)])
    tokenizer.save_pretrained(folder)
    _, projector = convert(folder, path, type="f32")
    expected = twin.model.language_model.embed_tokens.weight[-1]
    stored = torch.from_numpy(matrices(projector)["v.token_embd.img_break"].copy())
    assert torch.equal(stored, expected)
    tower = load_tower(row.build, projector)
    assert encoded(tower, random(1, 3, 24, 36)).shape == (1, 6, 64)


def test_lighton_has_the_eps_of_its_text_model_where_its_file_states_none(tmp_path) -> None:
    pair, build = TOWERS["lighton"].write(tmp_path), TOWERS["lighton"].build
    stated = changed(pair.path, {PROJECTOR_EPS: 1e-6}).rename(tmp_path / "stated.gguf")
    silent = changed(pair.path, {PROJECTOR_EPS: None})
    pixels = random(1, 3, 24, 36)
    features = encoded(load_tower(build, silent), pixels)
    assert torch.equal(features, encoded(load_tower(build, stated), pixels))
    assert not torch.equal(features, encoded(pair.tower, pixels))


def test_mllama_grids_with_as_many_tiles_have_different_positions(tmp_path) -> None:
    row = TOWERS["mllama"]
    pair = row.write(tmp_path)
    pixels = row.pixels(pair, 1, None)
    wide, tall = (encoded(pair.tower, pixels, grid) for grid in ((1, 2), (2, 1)))
    assert worst(wide, tall) > 1e-2


def test_mllama_with_states_of_missing_layers_is_refused(tmp_path) -> None:
    path = TOWERS["mllama"].write(tmp_path).path
    keys = {"vision.intermediate_layers_indices": [0, 3]}
    check_refused("mllama", changed(path, keys), ModelFileError, "of 3 layers")


def test_mllama_with_states_of_no_layer_is_refused(tmp_path) -> None:
    """Its projection is as narrow as that needs, so that nothing else contradicts."""
    source = TOWERS["mllama"].write(tmp_path).path
    wide = matrices(source)["mm.0.weight"]
    tensors = {"mm.0.weight": np.ascontiguousarray(wide[:, : wide.shape[1] // 3])}
    path = changed(source, tensors=tensors)
    file = parse(path.read_bytes())
    assert file is not None
    name = b"mllama.vision.intermediate_layers_indices"
    next(key for key in file.keys if key.name == name).items = []
    path.write_bytes(file.bytes())
    check_refused("mllama", path, ModelFileError, "intermediate_layers_indices` is empty")


@pytest.mark.parametrize(
    "keys",
    [
        {"vision.projector.scale_factor": 2},
        {"vision.wa_layer_indexes": [3]},
        {"vision.wa_layer_indexes": [0, 1]},
        {"vision.wa_layer_indexes": None},
    ],
)
def test_minicpmv46_of_other_ways_to_merge_is_refused(tmp_path, keys) -> None:
    path = changed(TOWERS["minicpmv46"].write(tmp_path).path, keys)
    check_refused("minicpmv46", path, ModelFileError, next(iter(keys)))


def test_paddleocr_of_llama_cpps_converter_agrees(tmp_path) -> None:
    """Its files do not state how many patches are merged."""
    pair = TOWERS["paddleocr"].write(tmp_path)
    check_same("paddleocr", pair, changed(pair.path, {"vision.spatial_merge_size": None}))


def test_paddleocr_is_converted_as_published(tmp_path) -> None:
    """Settings of the text model beside those of the vision model, and tensors without use."""
    pair, folder = TOWERS["paddleocr"].write(tmp_path), tmp_path / "folder"
    write_tiny_folder(folder, TOWERS["paddleocr"].make())
    settings = json.loads((folder / "config.json").read_text())
    text, vision = settings.pop("text_config"), settings["vision_config"]
    rope = text.pop("rope_parameters")
    flat = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": "default"}}
    vision = vision | {"model_type": "paddleocr_vl", "temporal_patch_size": 2}
    settings = text | settings | flat | {"vision_config": vision}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors, prefix = load_file(folder / "model.safetensors"), "visual.vision_model"
    tensors[f"{prefix}.head.probe"] = torch.ones(1, 1, 48)
    tensors[f"{prefix}.head.layernorm.weight"] = torch.ones(48)
    tensors[f"{prefix}.embeddings.packing_position_embedding.weight"] = torch.ones(9, 48)
    save_file(tensors, folder / "model.safetensors")
    texts, projector = convert(folder, tmp_path / "published.gguf", type="f32")
    check_same("paddleocr", pair, projector)
    stored, expected = matrices(texts), matrices(tmp_path / "tiny.gguf")
    assert stored.keys() == expected.keys()
    assert all(np.array_equal(stored[name], expected[name]) for name in stored)


@pytest.mark.parametrize("config", TOWERS["qwen3vl"].configs)
def test_qwen3vl_rows_have_parts_for_the_first_text_layers(tmp_path, config: str) -> None:
    pair = TOWERS["qwen3vl"].write(tmp_path, config)
    deep = len(pair.twin.config.vision_config.deepstack_visual_indexes)
    assert pair.tower.limits.width == (1 + deep) * 64


def test_qwen35_without_deep_layers_in_ollamas_files_agrees(tmp_path) -> None:
    """Ollama's converter writes an empty list, ours no key."""
    pair = TOWERS["qwen3vl"].write(tmp_path, "no_deepstack", flavour="ollama")
    path = changed(pair.path, {"vision.deepstack_visual_indexes": [0]})
    file = parse(path.read_bytes())
    assert file is not None
    name = b"qwen3vl.vision.deepstack_visual_indexes"
    next(key for key in file.keys if key.name == name).items = []
    path.write_bytes(file.bytes())
    check_same("qwen3vl", pair, path)
