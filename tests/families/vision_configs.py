"""Tiny configurations of vision models, for the tables of towers and of whole models.

Keyword arguments of a function that it does not name are settings of the vision part; `text` and
`sizes` have settings of the text part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import (
    Exaone4_5_Config,
    Gemma3Config,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Glm4vConfig,
    HunYuanVLConfig,
    InternVLConfig,
    Lfm2VlConfig,
    LightOnOcrConfig,
    Llama4Config,
    LlavaConfig,
    LlavaNextConfig,
    Mistral3Config,
    MllamaConfig,
    PaddleOCRVLConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from model_zoo.models.gemma3 import placeholders as gemma3
from model_zoo.models.gemma4 import placeholders as gemma4
from model_zoo.models.glm4v import placeholders as glm4v
from model_zoo.models.hunyuan import placeholders as hunyuan
from model_zoo.models.idefics3 import placeholders as idefics3
from model_zoo.models.internvl import placeholders as internvl
from model_zoo.models.lfm2 import placeholders as lfm2
from model_zoo.models.lfm2.image_processor import Lfm2Processor
from model_zoo.models.llama4 import placeholders as llama4
from model_zoo.models.llava import placeholders as llava
from model_zoo.models.mistral3 import placeholders as mistral3
from model_zoo.models.mllama import placeholders as mllama
from model_zoo.models.paddleocr import placeholders as paddle
from model_zoo.models.qwen25vl import placeholders as exaone
from model_zoo.multimodal import qwen_placeholders as qwen
from tests.families.ernie_families import paddleocr
from tests.families.gemma_families import GEMMA4
from tests.families.hunyuan_families import hunyuan_vl
from tests.families.lfm2_families import LAYERS as LFM2
from tests.families.mamba_families import MULTIPLIERS
from tests.families.qwen_families import QWEN35, SQUARE_STATES
from tests.families.text_family import SIZES, rope
from tests.families.unrotated_families import EXAONE4
from tests.families.vision_agreement import special_ids

Settings = Mapping[str, Any]
SIDE = 36
CANVASES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))  # in tiles
HEADS_OF_16 = {"head_dim": 16}
VISION = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
FOUR_HEADS = VISION | {"num_attention_heads": 4, "image_size": SIDE, "patch_size": 6}
THREE_HEADS = VISION | {"num_attention_heads": 3, "patch_size": 6}
CLIP = {"model_type": "clip_vision_model"} | FOUR_HEADS | {"num_hidden_layers": 3}
SIGLIP = {"model_type": "siglip_vision_model", "layer_norm_eps": 1e-2}
GRANITE = {"text": "granite", "layers": [-3, 2, -1], **SIGLIP}
QWEN_VISION = {"hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 3}
QWEN25_VISION = QWEN_VISION | {"patch_size": 14, "window_size": 112, "out_hidden_size": 64}
QWEN25_VISION |= {"fullatt_block_indexes": [1, 3]}
QWEN_TOKENS = (qwen.START, qwen.PLACE, qwen.END, "<|video_pad|>")
GLM_TOKENS = glm4v.TEXTS.reserved
GLM_VISION = {"hidden_size": 48, "intermediate_size": 40, "depth": 2, "num_heads": 3}
GEMMA4_TOKENS = gemma4.TEXTS.reserved
GEMMA4_LARGE = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}


def exaone45_config(text: Settings | None = None, **vision: Any) -> Exaone4_5_Config:
    """Query heads share key and value heads; the second text layer has no rotation."""
    ids = special_ids(exaone.TEXTS.reserved)
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return Exaone4_5_Config(
        text_config=EXAONE4 | {"model_type": "exaone4"} | layers | (text or {}),
        vision_config=QWEN25_VISION | {"num_heads": 4, "num_key_value_heads": 2} | vision,
        image_token_id=ids[exaone.PLACE],
        video_token_id=ids[exaone.OTHER],
    )


def gemma3_config(rows: int = 9, window: int = 32, **vision: Any) -> Gemma3Config:
    text = SIZES | HEADS_OF_16 | {"num_hidden_layers": 6, "query_pre_attn_scalar": 16}
    ids = special_ids((gemma3.START, gemma3.PLACE, gemma3.END))
    return Gemma3Config(
        text_config=text | {"sliding_window": window},
        vision_config=FOUR_HEADS | {"image_size": 84, "patch_size": 14} | vision,
        mm_tokens_per_image=rows,
        image_token_index=ids[gemma3.PLACE],
        image_token_id=ids[gemma3.PLACE],
        boi_token_index=ids[gemma3.START],
        eoi_token_index=ids[gemma3.END],
    )


def gemma4_ids() -> dict[str, int]:
    ids = special_ids(GEMMA4_TOKENS)
    return {
        "image_token_id": ids[gemma4.PLACE],
        "boi_token_id": ids[gemma4.START],
        "eoi_token_id": ids[gemma4.END],
        "video_token_id": ids["<|video|>"],
        "audio_token_id": ids["<|audio|>"],
    }


def gemma4_config(text: Settings | None = None, **vision: Any) -> Gemma4Config:
    sizes = THREE_HEADS | HEADS_OF_16 | {"num_key_value_heads": 3, "patch_size": 4}
    sizes |= {"pooling_kernel_size": 3, "position_embedding_size": 900}
    return Gemma4Config(
        text_config=GEMMA4 | GEMMA4_LARGE | (text or {}),
        vision_config=sizes | vision,
        **gemma4_ids(),
    )


def gemma4_unified_config(text: Settings | None = None, **vision: Any) -> Gemma4UnifiedConfig:
    sizes = {"patch_size": 4, "pooling_kernel_size": 3, "mm_posemb_size": 300}
    return Gemma4UnifiedConfig(
        text_config=GEMMA4 | (text or {}),
        vision_config=sizes | {"mm_embed_dim": 48, "output_proj_dims": 48} | vision,
        **gemma4_ids(),
    )


def glm_ids() -> dict[str, int]:
    ids = special_ids(GLM_TOKENS)
    return {
        "image_token_id": ids[glm4v.PLACE],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids[glm4v.START],
        "image_end_token_id": ids[glm4v.END],
    }


def glm4v_config(
    make: type = Glm4vConfig, text: Settings | None = None, **vision: Any
) -> PreTrainedConfig:
    rotation = rope(1e4, mrope_section=[1, 1, 2], partial_rotary_factor=0.5)
    sizes = GLM_VISION | {"image_size": 84, "out_hidden_size": 64}
    return make(
        text_config=SIZES | rotation | (text or {}), vision_config=sizes | vision, **glm_ids()
    )


def hunyuan_vl_config(**vision: Any) -> HunYuanVLConfig:
    config = hunyuan_vl(**vision)
    config.image_token_id = special_ids(hunyuan.TEXTS.reserved)[hunyuan.PLACE]
    return config


def idefics3_config(
    make: type = SmolVLMConfig, shuffled: int = 3, **vision: Any
) -> PreTrainedConfig:
    place = special_ids(idefics3.TEXTS.reserved)[idefics3.PLACE]
    return make(
        text_config={"model_type": "llama", **SIZES},
        vision_config=FOUR_HEADS | vision,
        scale_factor=shuffled,
        image_token_id=place,
    )


def internvl_config(
    text: str = "qwen2", ratio: float = 0.5, sizes: Settings | None = None, **vision: Any
) -> InternVLConfig:
    return InternVLConfig(
        text_config={"model_type": text, **SIZES, **(sizes or {})},
        vision_config=FOUR_HEADS | {"image_size": [SIDE, SIDE], "patch_size": [6, 6]} | vision,
        downsample_ratio=ratio,
        image_token_id=special_ids(internvl.TEXTS.reserved)[internvl.PLACE],
    )


LFM2_CUTTING = {  # of the larger picture of two in a conversation
    "tile_size": 24,
    "min_tiles": 2,
    "max_tiles": 4,
    "min_image_tokens": 2,
    "max_image_tokens": 12,
    "max_pixels_tolerance": 5.0,
}


def lfm2_processor(patch: int = 6, merge: int = 2) -> Lfm2Processor:
    """With the settings LFM2_CUTTING; tiles have as many patches for each size of a patch."""
    tiles = {"tile": 4 * patch, "min_tiles": 2, "max_tiles": 4}
    return Lfm2Processor(patch, merge, 2, 12, **tiles, tolerance=5.0)


def lfm2_config(merge: int = 2, norm: bool = True, **vision: Any) -> Lfm2VlConfig:
    sizes = {k: v for k, v in FOUR_HEADS.items() if k != "image_size"} | {"num_patches": 25}
    return Lfm2VlConfig(
        text_config={"model_type": "lfm2", **LFM2, "block_multiple_of": 32},
        vision_config={"model_type": "siglip2_vision_model"} | sizes | vision,
        projector_hidden_size=40,
        projector_use_layernorm=norm,
        downsample_factor=merge,
        image_token_id=special_ids(lfm2.TEXTS.reserved)[lfm2.PLACE],
    )


def llama4_config(ratio: float = 0.5, **vision: Any) -> Llama4Config:
    text = SIZES | HEADS_OF_16 | {"num_hidden_layers": 4, "intermediate_size": 32}
    text |= {"intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 64}
    sizes = THREE_HEADS | {"intermediate_size": int(48 / ratio**2), "image_size": 36}
    sizes |= {"projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40}
    place = special_ids(llama4.TEXTS.reserved)[llama4.PLACE]
    return Llama4Config(
        text_config=text,
        vision_config=sizes | {"pixel_shuffle_ratio": ratio} | vision,
        image_token_index=place,
    )


def llava_config(text: str = "llama", layer: int = -2, **vision: Any) -> LlavaConfig:
    more = {"pad_token_id": 0} if text == "phi3" else {}
    return LlavaConfig(
        text_config={"model_type": text, **SIZES, **more},
        vision_config=CLIP | vision,
        vision_feature_layer=layer,
        image_token_index=special_ids(llava.TEXTS.reserved)[llava.PLACE],
    )


def llava_next_config(
    text: str = "mistral",
    canvases: Sequence[tuple[int, int]] = CANVASES,
    layers: int | list[int] = -2,
    strategy: str = "",
    **vision: Any,
) -> LlavaNextConfig:
    # Beside a vision model, `transformers` does not divide Granite's logits.
    more = MULTIPLIERS | {"logits_scaling": 1.0} if text == "granite" else {}
    is_clip = vision.get("model_type") in (None, CLIP["model_type"])
    return LlavaNextConfig(
        text_config={"model_type": text, **SIZES, **more},
        vision_config=CLIP | {"patch_size": 9} | vision,
        vision_feature_layer=layers,
        vision_feature_select_strategy=strategy or ("default" if is_clip else "full"),
        image_grid_pinpoints=[[SIDE * tiles for tiles in canvas] for canvas in canvases],
        image_token_index=special_ids(llava.TEXTS.reserved)[llava.PLACE],
    )


def mistral3_config(*, bias: bool = False, merge: int = 2, **vision: Any) -> Mistral3Config:
    text = {"model_type": "mistral", "sliding_window": None, "rms_norm_eps": 1e-3}
    sizes = {"model_type": "pixtral", "image_size": 60, "hidden_act": "silu", **THREE_HEADS}
    place = special_ids((mistral3.PLACE, mistral3.BREAK, mistral3.END))[mistral3.PLACE]
    return Mistral3Config(
        text_config=text | SIZES | {"head_dim": 32},
        vision_config=sizes | vision,
        multimodal_projector_bias=bias,
        spatial_merge_size=merge,
        image_token_id=place,
    )


def lighton_config(**vision: Any) -> LightOnOcrConfig:
    sizes = {"model_type": "pixtral", "image_size": 60, "hidden_act": "silu", **THREE_HEADS}
    return LightOnOcrConfig(
        text_config={"model_type": "qwen3", "rms_norm_eps": 1e-3, **SIZES, **HEADS_OF_16},
        vision_config=sizes | vision,
        image_token_id=special_ids(QWEN_TOKENS)[qwen.PLACE],
    )


def mllama_config(kept: Sequence[int] = (0, 2), **vision: Any) -> MllamaConfig:
    text = SIZES | rope(10000.0) | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
    sizes = VISION | {"num_hidden_layers": 3, "attention_heads": 3, "num_global_layers": 2}
    sizes |= {"image_size": 36, "patch_size": 6, "intermediate_layers_indices": list(kept)}
    sizes |= {"vision_output_dim": 48 * (1 + len(kept))}
    place = special_ids((mllama.PLACE,))[mllama.PLACE]
    return MllamaConfig(text_config=text, vision_config=sizes | vision, image_token_index=place)


def paddleocr_config(**vision: Any) -> PaddleOCRVLConfig:
    config = paddleocr(**vision)
    ids = special_ids(paddle.TEXTS.reserved)
    config.image_token_id = ids[paddle.PLACE]
    config.vision_start_token_id, config.vision_end_token_id = ids[paddle.START], ids[paddle.END]
    return config


def qwen_ids() -> dict[str, int]:
    ids = special_ids(QWEN_TOKENS)
    return {
        "image_token_id": ids[qwen.PLACE],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids[qwen.START],
        "vision_end_token_id": ids[qwen.END],
    }


def qwen25vl_config(**vision: Any) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config=SIZES | rope(1e6, mrope_section=[2, 3, 3]),
        vision_config=QWEN25_VISION | vision,
        **qwen_ids(),
    )


def qwen3vl_config(
    make: type = Qwen3VLConfig, text: Settings | None = None, **vision: Any
) -> PreTrainedConfig:
    texts = SIZES | HEADS_OF_16 | rope(5e6, mrope_section=[3, 3, 2]) | {"num_hidden_layers": 4}
    sizes = QWEN_VISION | {"patch_size": 16, "num_position_embeddings": 49}
    sizes |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 2]}
    return make(
        text_config=texts | {"tie_word_embeddings": False} | (text or {}),
        vision_config=sizes | vision,
        **qwen_ids(),
    )


def qwen35_config(
    make: type = Qwen3_5Config, text: Settings = QWEN35 | SQUARE_STATES, **vision: Any
) -> PreTrainedConfig:
    sizes = QWEN_VISION | {"patch_size": 16, "num_position_embeddings": 49, "out_hidden_size": 64}
    return make(text_config=dict(text), vision_config=sizes | vision, **qwen_ids())
