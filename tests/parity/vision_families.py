"""The table of whole vision models: tiny configurations, placeholder tokens, image settings.

`test_vision_models.py` compares logits for every row, `test_vision_engine.py` answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma4Config,
    Idefics3Config,
    InternVLConfig,
    Llama4Config,
    LlavaConfig,
    LlavaNextConfig,
    Mistral3Config,
    MllamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
)

from model_zoo.models.gemma3 import placeholders as gemma3
from model_zoo.models.gemma4 import placeholders as gemma4
from model_zoo.models.idefics3 import placeholders as idefics3
from model_zoo.models.internvl import placeholders as internvl
from model_zoo.models.llama4 import placeholders as llama4
from model_zoo.models.llava import placeholders as llava
from model_zoo.models.mistral3 import placeholders as mistral3
from model_zoo.models.mllama import placeholders as mllama
from model_zoo.multimodal import qwen_placeholders as qwen
from tests.parity import vision_references as references
from tests.parity.gemma_families import EXPERTS, GEMMA4, KEYS_AS_VALUES, SHARED_KEYS
from tests.parity.text_family import SIZES, rope
from tests.parity.vision_agreement import (
    FLAVOURS,
    Expected,
    VisionPair,
    make_vision_pair,
    special_ids,
)
from tests.tiny_models import tiny_tokenizer

SIDE = 36
HEADS_OF_16 = {"head_dim": 16}
VISION = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
FOUR_HEADS = VISION | {"num_attention_heads": 4, "image_size": SIDE, "patch_size": 6}
THREE_HEADS = VISION | {"num_attention_heads": 3, "patch_size": 6}
CLIP = {"model_type": "clip_vision_model"} | FOUR_HEADS | {"num_hidden_layers": 3}
QWEN_VISION = {"hidden_size": 48, "intermediate_size": 80, "depth": 4, "num_heads": 3}
QWEN_TOKENS = (qwen.START, qwen.PLACE, qwen.END, "<|video_pad|>")
CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
SQUARE = {"size": {"height": SIDE, "width": SIDE}}


@dataclass(frozen=True)
class VisionFamily:
    """A family of vision models.

    make: a configuration from settings. configs: by name, the settings of each.
    expected: logits of `transformers`. special: tokens behind those of the tiny tokenizer.
    spelled: what the template writes for an image. processor: settings of the image processor.
    flavours: of the files; `engine_flavour` that of `test_vision_engine.py`, None to skip.
    grids: of the images of "two images in one message", which shall be different and no squares.
    """

    make: Callable[..., PreTrainedConfig]
    configs: Mapping[str, Mapping[str, Any]]
    expected: Expected
    special: Sequence[str]
    spelled: str
    processor: Mapping[str, Any] = field(default_factory=dict)
    flavours: Sequence[str] = ("llama.cpp",)
    engine_flavour: str | None = "llama.cpp"
    grids: Sequence[tuple[int, int]] = ()

    def write(
        self,
        folder: Path,
        config: str = "plain",
        *,
        flavour: str = "",
        processor: Mapping[str, Any] | None = None,
        files: tuple[str, str] = ("tiny.gguf", "mmproj-tiny.gguf"),
        **changes: Any,
    ) -> VisionPair:
        """Write the tiny model to `folder` and load it; `flavour`: the first one if empty."""
        return make_vision_pair(
            self.make(**(self.configs[config] | changes)),
            folder,
            self.expected,
            special=self.special,
            spelled=self.spelled,
            flavour=flavour or self.flavours[0],
            settings=dict(self.processor if processor is None else processor),
            files=files,
        )


def gemma3_config(rows: int = 9, window: int = 32) -> Gemma3Config:
    text = SIZES | HEADS_OF_16 | {"num_hidden_layers": 6, "query_pre_attn_scalar": 16}
    ids = special_ids((gemma3.START, gemma3.PLACE, gemma3.END))
    return Gemma3Config(
        text_config=text | {"sliding_window": window},
        vision_config=FOUR_HEADS | {"image_size": 84, "patch_size": 14},
        mm_tokens_per_image=rows,
        image_token_index=ids[gemma3.PLACE],
        image_token_id=ids[gemma3.PLACE],
        boi_token_index=ids[gemma3.START],
        eoi_token_index=ids[gemma3.END],
    )


GEMMA4_TOKENS = gemma4.Gemma4Placeholders.reserved
GEMMA4_LARGE = {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
GEMMA4_SMALL = SHARED_KEYS | {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": tiny_tokenizer().get_vocab_size() + len(GEMMA4_TOKENS),
    "use_bidirectional_attention": None,
}


def gemma4_config(**changes: Any) -> Gemma4Config:
    ids = special_ids(GEMMA4_TOKENS)
    vision = THREE_HEADS | HEADS_OF_16 | {"num_key_value_heads": 3, "patch_size": 4}
    return Gemma4Config(
        text_config=GEMMA4 | GEMMA4_LARGE | changes,
        vision_config=vision | {"pooling_kernel_size": 3, "position_embedding_size": 40},
        image_token_id=ids[gemma4.PLACE],
        boi_token_id=ids[gemma4.START],
        eoi_token_id=ids[gemma4.END],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<|audio|>"],
    )


def idefics3_config(make: type = SmolVLMConfig) -> PreTrainedConfig:
    place = special_ids(idefics3.Idefics3Placeholders.reserved)[idefics3.PLACE]
    text = {"model_type": "llama", **SIZES}
    return make(text_config=text, vision_config=FOUR_HEADS, scale_factor=3, image_token_id=place)


def internvl_config(text: str = "qwen2", **sizes: Any) -> InternVLConfig:
    return InternVLConfig(
        text_config={"model_type": text, **SIZES, **sizes},
        vision_config=FOUR_HEADS | {"image_size": [SIDE, SIDE], "patch_size": [6, 6]},
        image_token_id=special_ids(internvl.InternVLPlaceholders.reserved)[internvl.PLACE],
    )


def llama4_config() -> Llama4Config:
    text = SIZES | HEADS_OF_16 | {"num_hidden_layers": 4, "intermediate_size": 32}
    text |= {"intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 64}
    vision = THREE_HEADS | {"intermediate_size": 192, "image_size": 36, "pixel_shuffle_ratio": 0.5}
    vision |= {"projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40}
    place = special_ids(llama4.Llama4Placeholders.reserved)[llama4.PLACE]
    return Llama4Config(text_config=text, vision_config=vision, image_token_index=place)


def llava_config(text: str = "llama") -> LlavaConfig:
    more = {"pad_token_id": 0} if text == "phi3" else {}
    return LlavaConfig(
        text_config={"model_type": text, **SIZES, **more},
        vision_config=CLIP,
        image_token_index=special_ids(llava.LlavaPlaceholders.reserved)[llava.PLACE],
    )


def llava_next_config(text: str = "mistral") -> LlavaNextConfig:
    return LlavaNextConfig(
        text_config={"model_type": text, **SIZES},
        vision_config=CLIP | {"patch_size": 9},
        image_grid_pinpoints=[[36, 72], [72, 36], [72, 72], [108, 36], [36, 108]],
        image_token_index=special_ids(llava.LlavaPlaceholders.reserved)[llava.PLACE],
    )


def mistral3_config() -> Mistral3Config:
    text = {"model_type": "mistral", "sliding_window": None, **SIZES, "head_dim": 32}
    vision = {"model_type": "pixtral", "image_size": 60, "hidden_act": "silu", **THREE_HEADS}
    place = special_ids((mistral3.PLACE, mistral3.BREAK, mistral3.END))[mistral3.PLACE]
    return Mistral3Config(
        text_config=text, vision_config=vision, spatial_merge_size=2, image_token_id=place
    )


def mllama_config() -> MllamaConfig:
    text = SIZES | rope(10000.0) | {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
    vision = VISION | {"num_hidden_layers": 3, "attention_heads": 3, "num_global_layers": 2}
    vision |= {"image_size": 36, "patch_size": 6, "intermediate_layers_indices": [0, 2]}
    place = special_ids((mllama.PLACE,))[mllama.PLACE]
    return MllamaConfig(
        text_config=text, vision_config=vision | {"vision_output_dim": 144}, image_token_index=place
    )


def qwen_ids() -> dict[str, int]:
    ids = special_ids(QWEN_TOKENS)
    return {
        "image_token_id": ids[qwen.PLACE],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids[qwen.START],
        "vision_end_token_id": ids[qwen.END],
    }


def qwen25vl_config() -> Qwen2_5_VLConfig:
    vision = QWEN_VISION | {"patch_size": 14, "window_size": 112, "out_hidden_size": 64}
    return Qwen2_5_VLConfig(
        text_config=SIZES | rope(1e6, mrope_section=[2, 3, 3]),
        vision_config=vision | {"fullatt_block_indexes": [1, 3]},
        **qwen_ids(),
    )


def qwen3vl_config(make: type = Qwen3VLConfig, **text: Any) -> PreTrainedConfig:
    texts = SIZES | HEADS_OF_16 | rope(5e6, mrope_section=[3, 3, 2]) | {"num_hidden_layers": 4}
    vision = QWEN_VISION | {"patch_size": 16, "num_position_embeddings": 49}
    return make(
        text_config=texts | {"tie_word_embeddings": False} | text,
        vision_config=vision | {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 2]},
        **qwen_ids(),
    )


GEMMA4_ROW = {
    "make": gemma4_config,
    "expected": references.gemma4,
    "special": GEMMA4_TOKENS,
    "spelled": gemma4.PLACE,
    "processor": {"max_soft_tokens": 12, "patch_size": 4, "pooling_kernel_size": 3},
    "flavours": FLAVOURS,
    "grids": [(2, 5), (5, 2)],
}
LLAVA_ROW = {
    "make": llava_config,
    "expected": references.squares,
    "special": llava.LlavaPlaceholders.reserved,
    "spelled": llava.PLACE + "\n",
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}

VISION_MODELS: Mapping[str, VisionFamily] = {
    "gemma3": VisionFamily(
        gemma3_config,
        {"plain": {}, "images_larger_than_the_window": {"rows": 36, "window": 12}},
        references.gemma3,
        special=(gemma3.START, gemma3.PLACE, gemma3.END),
        spelled=gemma3.START,
        flavours=FLAVOURS,
    ),
    "gemma4": VisionFamily(
        configs={
            "plain": KEYS_AS_VALUES,
            "images_larger_than_the_window": KEYS_AS_VALUES | {"sliding_window": 5},
            "experts": EXPERTS | KEYS_AS_VALUES,
        },
        **GEMMA4_ROW,
    ),
    "gemma4_small": VisionFamily(
        configs={"plain": GEMMA4_SMALL}, engine_flavour="ollama", **GEMMA4_ROW
    ),
    "idefics3": VisionFamily(
        idefics3_config,
        {"plain": {}, "idefics3": {"make": Idefics3Config}},
        references.idefics3,
        special=idefics3.Idefics3Placeholders.reserved,
        spelled=idefics3.PLACE,
        processor={"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        grids=[(2, 3), (3, 2)],
    ),
    "internvl": VisionFamily(
        internvl_config,
        {
            "plain": {},
            "llama": {"text": "llama"},
            "qwen3": {"text": "qwen3"} | HEADS_OF_16,
            "qwen3moe": {"text": "qwen3_moe", "moe_intermediate_size": 32} | HEADS_OF_16 | MOE,
        },
        references.tiles,
        special=internvl.InternVLPlaceholders.reserved,
        spelled=internvl.PLACE + "\n",
        processor=SQUARE | {"max_patches": 6},
        grids=[(1, 2), (2, 1)],
    ),
    "llama4": VisionFamily(
        llama4_config,
        {"plain": {}},
        references.tiles,
        special=llama4.Llama4Placeholders.reserved,
        spelled=llama4.WHOLE,
        flavours=FLAVOURS,
        engine_flavour="ollama",
    ),
    "llava": VisionFamily(
        configs={"plain": {}},
        processor={"size": {"shortest_edge": SIDE}, "do_pad": True},
        **LLAVA_ROW,
    ),
    "llava_cropped": VisionFamily(
        configs={
            "plain": {},
            **{text: {"text": text} for text in ("mistral", "phi3", "qwen2")},
        },
        processor=CROPPED,
        engine_flavour=None,
        **LLAVA_ROW,
    ),
    "llava_next": VisionFamily(
        llava_next_config,
        {"plain": {}, "llama": {"text": "llama"}, "qwen2": {"text": "qwen2"}},
        references.llava_next,
        special=llava.LlavaPlaceholders.reserved,
        spelled=llava.PLACE + "\n",
        processor=CROPPED,
        grids=[(60, 130), (150, 70)],
    ),
    "mistral3": VisionFamily(
        mistral3_config,
        {"plain": {}},
        references.mistral3,
        special=(mistral3.PLACE, mistral3.BREAK, mistral3.END),
        spelled=mistral3.PLACE,
        flavours=FLAVOURS,
    ),
    "mllama": VisionFamily(
        mllama_config,
        {"plain": {}},
        references.mllama,
        special=(mllama.PLACE,),
        spelled=mllama.PLACE,
        flavours=("ollama",),
        engine_flavour="ollama",
    ),
    "qwen25vl": VisionFamily(
        qwen25vl_config,
        {"plain": {}},
        references.qwen,
        special=QWEN_TOKENS,
        spelled=qwen.START + qwen.PLACE + qwen.END,
        processor={"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
        flavours=FLAVOURS,
        engine_flavour="ollama",
    ),
    "qwen3vl": VisionFamily(
        qwen3vl_config,
        {"plain": {}, "experts": {"make": Qwen3VLMoeConfig, "moe_intermediate_size": 48} | MOE},
        references.qwen,
        special=QWEN_TOKENS,
        spelled=qwen.START + qwen.PLACE + qwen.END,
        processor={"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 30}},
        flavours=FLAVOURS,
    ),
}
