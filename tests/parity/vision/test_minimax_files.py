"""Projector files of MiniMax M3: the layout of llama.cpp's converter, and published settings."""

import json

import numpy as np

from model_zoo.convert.convert_folder import convert
from tests.families.minimax_families import TOWER, VISION, config
from tests.gguf_files import matrices
from tests.tiny_models import write_tiny_folder

# Elements of a head of 16 in a file, by their numbers in checkpoints: first and second elements of
# both pairs of time, of row and of column, and the rest (`_permute_vit_qk` of llama.cpp).
ELEMENTS = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, 12, 13, 14, 15]


def test_axes_of_queries_and_keys_are_apart_as_in_llama_cpps_files(tmp_path) -> None:
    pair = TOWER.write(tmp_path)
    stored, attention = matrices(pair.path), pair.twin.model.vision_tower.layers[1].self_attn
    heads = VISION["num_attention_heads"]
    for name, projection in (("attn_q", attention.q_proj), ("attn_k", attention.k_proj)):
        for part in ("weight", "bias"):
            theirs = getattr(projection, part).unflatten(0, (heads, -1))[:, ELEMENTS].flatten(0, 1)
            assert np.array_equal(stored[f"v.blk.1.{name}.{part}"], theirs.detach())


def test_settings_are_read_as_published(tmp_path) -> None:
    """Settings of the merger are nested, and the stated size of images is not used."""
    pair, folder = TOWER.write(tmp_path), tmp_path / "folder"
    write_tiny_folder(folder, config())
    settings = json.loads((folder / "config.json").read_text())
    vision = settings["vision_config"]
    merged = {"spatial_merge_size": vision.pop("spatial_merge_size"), "temporal_patch_size": 2}
    vision |= {"img_token_compression_config": merged, "rope_theta": 10000.0}
    vision.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": [672, 672]}))
    _, projector = convert(folder, tmp_path / "published.gguf", type="f32")
    stored, expected = matrices(projector), matrices(pair.path)
    assert stored.keys() == expected.keys()
    assert all((stored[name] == expected[name]).all() for name in stored)
