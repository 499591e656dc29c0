"""The table of vision towers: tiny configurations, their inputs, and features of `transformers`.

`test_towers.py` checks every row.
"""

from collections.abc import Mapping

from transformers import Glm46VConfig, GlmOcrConfig, Idefics3Config, PreTrainedConfig

from model_zoo.models.gemma3 import vision as gemma3
from model_zoo.models.gemma4 import multimodal as gemma4
from model_zoo.models.glm4v import vision as glm4v
from model_zoo.models.hunyuan import vision as hunyuan
from model_zoo.models.hunyuan.image_processor import HunyuanProcessor
from model_zoo.models.idefics3 import vision as idefics3
from model_zoo.models.internvl import multimodal as internvl_files
from model_zoo.models.internvl import vision as internvl
from model_zoo.models.llama4 import multimodal as llama4_files
from model_zoo.models.llama4 import vision as llama4
from model_zoo.models.llava import multimodal as llava_files
from model_zoo.models.llava import vision as llava
from model_zoo.models.llava import vision_next as llava_next
from model_zoo.models.mistral3 import multimodal as mistral3_files
from model_zoo.models.mistral3 import vision as mistral3
from model_zoo.models.mllama import vision as mllama
from model_zoo.models.paddleocr import vision as paddleocr
from model_zoo.models.qwen3vl import vision as qwen3vl
from model_zoo.models.qwen25vl import vision as qwen25vl
from tests.families import (
    deepseekocr2_families,
    deepseekocr_families,
    dots_families,
    kimivl_families,
    minicpmv4_6_families,
    minicpmv_families,
    minimax_families,
    moondream_families,
    muse_families,
    step3vl_families,
)
from tests.families import tower_references as references
from tests.families.tower_builders import lfm2_tower, with_37_tiles, with_211_rows, with_processor
from tests.families.tower_family import TowerFamily
from tests.families.tower_inputs import (
    QWEN_GRIDS,
    gemma4_image,
    largest,
    lfm2_parts,
    mistral3_image,
    next_tiles,
    qwen_patches,
    tiles,
)
from tests.families.towers import FLAVOURS
from tests.families.vision_configs import (
    GRANITE,
    SIGLIP,
    exaone45_config,
    gemma3_config,
    gemma4_config,
    gemma4_unified_config,
    glm4v_config,
    hunyuan_vl_config,
    idefics3_config,
    internvl_config,
    lfm2_config,
    lighton_config,
    llama4_config,
    llava_config,
    llava_next_config,
    mistral3_config,
    mllama_config,
    paddleocr_config,
    qwen3vl_config,
    qwen25vl_config,
)

LLAMA_CPP, OLLAMA = ("llama.cpp",), ("ollama",)
LARGER_ANGLES = {"rope_theta": 100.0}

TOWERS: Mapping[str, TowerFamily] = {
    "deepseekocr": TowerFamily(
        deepseekocr_families.build_tower,
        deepseekocr_families.config,
        {
            "plain": {},
            "another_table_of_positions": {"clip": {"image_size": 42}, "num_attention_heads": 1},
        },
        deepseekocr_families.pixels,
        deepseekocr_families.tower_features,
        shapes=((1, 1), (2, 3)),
        grids=True,
        only={"another_table_of_positions": LLAMA_CPP},
        limit_images=(1,),
        save=deepseekocr_families.save_deepseekocr,
    ),
    "deepseekocr2": TowerFamily(
        deepseekocr2_families.build_tower,
        deepseekocr2_families.config,
        {"plain": {}},
        deepseekocr_families.pixels,
        deepseekocr2_families.tower_features,
        flavours=LLAMA_CPP,
        shapes=((1, 1), (1, 2)),
        grids=True,
        limit_images=(1,),
    ),
    "dots_ocr": dots_families.TOWER,
    "exaone45": TowerFamily(
        with_211_rows(qwen25vl.Qwen25VLTower),
        exaone45_config,
        {"plain": {}, "one_head_of_keys": {"num_key_value_heads": 1}},
        qwen_patches,
        references.qwen25vl,
        shapes=QWEN_GRIDS,
        grids=True,
        flavours=LLAMA_CPP,
        limit_images=(1,),
    ),
    "gemma3": TowerFamily(
        gemma3.Gemma3Tower,
        gemma3_config,
        {
            "plain": {},
            "no_pooling": {"rows": 36},
            "border_left_out": {"rows": 4, "image_size": 70},
            "other_eps": {"layer_norm_eps": 1e-2},
            "more_rows_than_a_slab": {
                "image_size": 48,
                "patch_size": 2,
                "rows": 64,
                "num_hidden_layers": 1,
            },
        },
        largest,
        references.gemma3,
        several=3,
    ),
    "gemma4": TowerFamily(
        gemma4.build_tower,
        gemma4_config,
        {
            "plain": {},
            "clipped": {"use_clipped_linears": True},
            "standardized": {"standardize": True},
            "pools_squares_of_two": {"pooling_kernel_size": 2},
            "other_eps": {"rms_norm_eps": 1e-2},
        },
        gemma4_image,
        references.gemma4,
        shapes=((4, 4), (1, 7), (5, 2), (9, 13)),
        grids=True,
        maker=references.Gemma4Maker,
        refused=[
            ({"num_key_value_heads": 1}, "llama.cpp", "share keys"),
            ({"head_dim": 8}, "llama.cpp", "add up to the hidden size"),
            ({"hidden_activation": "silu"}, "llama.cpp", "`hidden_activation`"),
            (
                {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
                "llama.cpp",
                "rotary base",
            ),
            ({"text": {"hidden_size_per_layer_input": 32}}, "llama.cpp", "do not state it"),
            ({"text": {"use_bidirectional_attention": None}}, "llama.cpp", "do not state it"),
        ],
    ),
    "gemma4_unified": TowerFamily(
        gemma4.build_tower,
        gemma4_unified_config,
        {"plain": {}, "squares_of_two_patches": {"pooling_kernel_size": 2, "rms_norm_eps": 1e-2}},
        gemma4_image,
        references.gemma4,
        shapes=((4, 4), (1, 7), (9, 13)),
        grids=True,
        flavours=LLAMA_CPP,
        refused=[({"text": {"use_bidirectional_attention": None}}, "llama.cpp", "do not state it")],
    ),
    "glm4v": TowerFamily(
        with_211_rows(glm4v.glm4v_tower),
        glm4v_config,
        {
            "plain": {},
            "glm46v_without_merging_with_biases": {
                "make": Glm46VConfig,
                "spatial_merge_size": 1,
                "attention_bias": True,
                "rms_norm_eps": 1e-2,
            },
            "glm_ocr": {"make": GlmOcrConfig, "rms_norm_eps": 1e-2},
        },
        qwen_patches,
        references.qwen25vl,
        shapes=QWEN_GRIDS,
        grids=True,
        flavours=LLAMA_CPP,
        only={"glm_ocr": FLAVOURS},
        text_file=True,
        refused=[
            ({"hidden_act": "gelu"}, "llama.cpp", "`hidden_act` of the vision part is gelu"),
            (
                {"rope_parameters": LARGER_ANGLES | {"rope_type": "axial"}},
                "llama.cpp",
                "rotary base",
            ),
        ],
    ),
    "hunyuan_vl": TowerFamily(
        with_211_rows(hunyuan.hunyuan_tower, HunyuanProcessor),
        hunyuan_vl_config,
        {"plain": {}, "merges_squares_of_three": {"spatial_merge_size": 3}},
        qwen_patches,
        references.hunyuan,
        shapes=QWEN_GRIDS,
        grids=True,
        flavours=LLAMA_CPP,
        refused=[({"interpolate_mode": "bicubic"}, "llama.cpp", "`interpolate_mode`")],
    ),
    "idefics3": TowerFamily(
        with_37_tiles(idefics3.Idefics3Tower),
        idefics3_config,
        {
            "plain": {},
            "idefics3": {"make": Idefics3Config},
            "shuffles_squares_of_two": {"shuffled": 2},
            "other_eps": {"make": Idefics3Config, "layer_norm_eps": 1e-2},
        },
        tiles,
        references.idefics3,
        shapes=(1, 5),
        flavours=LLAMA_CPP,
        limit_images=(1,),
        text_file=True,
    ),
    "internvl": TowerFamily(
        with_processor(internvl.InternVLTower, internvl_files.read_processor),
        internvl_config,
        {
            "plain": {},
            "biases": {"attention_bias": True},
            "qk_norms": {"use_qk_norm": True, "norm_type": "rms_norm"},
            "no_shuffling": {"ratio": 1.0},
            "norm_after_the_layers": {"use_mean_pooling": False},
        },
        tiles,
        references.internvl,
        shapes=(1, 5),
        flavours=LLAMA_CPP,
        limit_images=(1,),
        text_file=True,
    ),
    "kimivl": TowerFamily(
        kimivl_families.build_tower,
        PreTrainedConfig,
        {
            "plain": {},
            "one_position": {"pos_emb_height": 1, "pos_emb_width": 1},
            "k25": {"kind": "kimik25"},
        },
        kimivl_families.pixels,
        kimivl_families.tower_features,
        shapes=((4, 4), (1, 7), (5, 2)),
        grids=True,
        flavours=LLAMA_CPP,
        limit_images=(1,),
        writer=kimivl_families.write_tower,
    ),
    "lfm2": TowerFamily(
        lfm2_tower,
        lfm2_config,
        {
            "plain": {"patch_size": 8},
            "no_norm_in_the_projector": {"patch_size": 8, "norm": False, "layer_norm_eps": 1e-2},
            "merges_squares_of_four": {"patch_size": 8, "merge": 4},
        },
        lfm2_parts,
        references.lfm2,
        shapes=((30, 50), (150, 70), (13, 17)),
        grids=True,
        flavours=LLAMA_CPP,
    ),
    "lighton": TowerFamily(
        with_processor(mistral3.PixtralTower, mistral3_files.read_processor),
        lighton_config,
        {"plain": {}},
        mistral3_image,
        references.mistral3,
        shapes=((6, 6), (12, 18)),
        flavours=LLAMA_CPP,
    ),
    "llama4": TowerFamily(
        with_processor(llama4.Llama4Tower, llama4_files.read_processor),
        llama4_config,
        {
            "plain": {},
            "one_row_of_two_by_two_patches": {"image_size": 12},
            "no_shuffling": {"ratio": 1.0},
            "larger_angles": {"rope_parameters": LARGER_ANGLES | {"rope_type": "default"}},
        },
        tiles,
        references.llama4,
        shapes=(1, 3, 7),
        only={"larger_angles": OLLAMA},
        limit_images=(1,),
        refused=[
            (
                {"rope_parameters": LARGER_ANGLES | {"rope_type": "default"}},
                "llama.cpp",
                "rotary base",
            )
        ],
    ),
    "llava": TowerFamily(
        llava.LlavaTower,
        llava_config,
        {
            "plain": {},
            "features_of_the_last_layer": {"layer": -1},
            "features_of_the_first_layer": {"layer": 1},
            "other_eps": {"layer_norm_eps": 1e-2},
        },
        largest,
        references.llava,
        several=3,
        flavours=LLAMA_CPP,
        text_file=True,
    ),
    "llava_next": TowerFamily(
        with_processor(llava_next.LlavaNextTower, llava_files.read_next_processor),
        llava_next_config,
        {
            "plain": {},
            "odd_number_of_rows": {"patch_size": 7},
            "one_canvas": {"canvases": [(4, 3)]},
            "granite": GRANITE,
            "one_layer_of_siglip": SIGLIP,
        },
        next_tiles,
        references.llava_next,
        shapes=((72, 72), (36, 72), (30, 100), (1, 500), (500, 1), (71, 33), (100, 97), (13, 17)),
        grids=True,
        flavours=LLAMA_CPP,
        refused=[
            ({"hidden_act": "gelu"}, "llama.cpp", "`hidden_act` of the vision part"),
            (SIGLIP | {"strategy": "default"}, "llama.cpp", "this vision model mean full"),
        ],
    ),
    "minicpmv": TowerFamily(
        minicpmv_families.build_tower,
        PreTrainedConfig,
        {
            "plain": {},
            "one_head_and_position": {"width": 128, "places": 1, "layer_norm_eps": 1e-2},
        },
        minicpmv_families.pixels,
        minicpmv_families.tower_features,
        shapes=((20, 30), (60, 130), (200, 1)),
        grids=True,
        flavours=LLAMA_CPP,
        limit_images=(1,),
        writer=minicpmv_families.write_tower,
    ),
    "minicpmv46": TowerFamily(
        minicpmv4_6_families.build_tower,
        minicpmv4_6_families.config,
        {"plain": {}, "merged_after_the_last_layer": {"layer": 2, "layer_norm_eps": 1e-2}},
        minicpmv4_6_families.pixels,
        minicpmv4_6_families.tower_features,
        shapes=((20, 30), (60, 230), (400, 3)),
        grids=True,
        flavours=LLAMA_CPP,
        limit_images=(1,),
        refused=[({"window_kernel_size": [1, 1]}, "llama.cpp", "`window_kernel_size`")],
    ),
    "mistral3": TowerFamily(
        with_processor(mistral3.PixtralTower, mistral3_files.read_processor),
        mistral3_config,
        {
            "plain": {},
            "biases": {"bias": True},
            "merges_squares_of_three": {"merge": 3, "image_size": 54},
            "larger_angles": {"rope_parameters": LARGER_ANGLES | {"rope_type": "axial"}},
            "gelu": {"hidden_act": "gelu"},
        },
        mistral3_image,
        references.mistral3,
        shapes=((6, 6), (6, 12), (12, 6), (18, 6)),
        only={"larger_angles": OLLAMA, "gelu": LLAMA_CPP},
        refused=[
            ({"hidden_act": "gelu"}, "ollama", "vision part is"),
            (
                {"rope_parameters": LARGER_ANGLES | {"rope_type": "axial"}},
                "llama.cpp",
                "vision part is",
            ),
        ],
    ),
    "mllama": TowerFamily(
        mllama.MllamaTower,
        mllama_config,
        {
            "plain": {},
            "other_states": {"kept": [1], "norm_eps": 1e-2},
            "another_side": {"image_size": 33},
        },
        largest,
        references.mllama,
        shapes=((1, 1), (1, 3), (2, 1), (2, 2), (4, 1)),
        grids=True,
        flavours=OLLAMA,
        limit_images=(1, 3),
        refused=[
            (
                {"supported_aspect_ratios": [[1, 1], [2, 1]], "max_num_tiles": 2},
                "ollama",
                "all grids of at most 2 tiles",
            )
        ],
    ),
    "minimax_m3": minimax_families.TOWER,
    "moondream": moondream_families.TOWER,
    "paddleocr": TowerFamily(
        with_211_rows(paddleocr.paddleocr_tower),
        paddleocr_config,
        {
            "plain": {},
            "no_merging_and_one_position": {
                "spatial_merge_size": 1,
                "image_size": 14,
                "layer_norm_eps": 1e-2,
            },
        },
        qwen_patches,
        references.paddleocr,
        shapes=QWEN_GRIDS,
        grids=True,
        flavours=LLAMA_CPP,
        refused=[
            ({"hidden_act": "gelu"}, "llama.cpp", "`hidden_act` of the vision part is gelu"),
            (
                {"rope_parameters": LARGER_ANGLES | {"rope_type": "axial"}},
                "llama.cpp",
                "rotary base",
            ),
        ],
    ),
    "muse_glimmer": muse_families.TOWER,
    "qwen25vl": TowerFamily(
        with_211_rows(qwen25vl.Qwen25VLTower),
        qwen25vl_config,
        {
            "plain": {},
            "windows_of_three_by_three": {"window_size": 84},
            "windows_of_one_row": {"window_size": 28},
            "no_merging": {"spatial_merge_size": 1, "patch_size": 28},
            "full_attention_in_every_layer": {"fullatt_block_indexes": [0, 1, 2, 3]},
            "attention_in_two_layers": {"fullatt_block_indexes": [0, 3]},
        },
        qwen_patches,
        references.qwen25vl,
        shapes=QWEN_GRIDS,
        grids=True,
        only=dict.fromkeys(
            ["windows_of_three_by_three", "windows_of_one_row", "attention_in_two_layers"],
            OLLAMA,
        ),
        refused=[
            ({"window_size": 84}, "llama.cpp", "`window_size` of the vision part is 84"),
            ({"fullatt_block_indexes": [0, 3]}, "llama.cpp", "every n-th"),
        ],
    ),
    "qwen3vl": TowerFamily(
        with_211_rows(qwen3vl.qwen3vl_tower),
        qwen3vl_config,
        {
            "plain": {},
            "no_merging": {"spatial_merge_size": 1},
            "one_position": {"num_position_embeddings": 1},
            "deepstack_of_the_last_layer": {"deepstack_visual_indexes": [1, 2, 3]},
            "no_deepstack": {"deepstack_visual_indexes": []},
        },
        qwen_patches,
        references.qwen3vl,
        shapes=QWEN_GRIDS,
        grids=True,
        only={"no_deepstack": LLAMA_CPP},
    ),
    "step3vl": TowerFamily(
        step3vl_families.build_tower,
        step3vl_families.config,
        {"plain": {}, "stretched_positions": {"layer_norm_eps": 1e-2, "image_size": 48}},
        step3vl_families.pixels,
        step3vl_families.tower_features,
        shapes=((0, 0), (1, 2), (3, 2)),
        grids=True,
        flavours=LLAMA_CPP,
        limit_images=(1,),
        refused=[({"hidden_act": "gelu"}, "llama.cpp", "`hidden_act` of the vision part is gelu")],
    ),
}
