"""The table of whole vision models: tiny configurations, placeholder tokens, image settings.

`test_vision_models.py` compares logits for every row, `test_vision_engine.py` answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import (
    Glm4vMoeConfig,
    GlmOcrConfig,
    Idefics3Config,
    PreTrainedConfig,
    Qwen3_5MoeConfig,
    Qwen3VLMoeConfig,
)

from model_zoo.models.deepseekocr import placeholders as deepseekocr
from model_zoo.models.dots_ocr import placeholders as dots
from model_zoo.models.gemma3 import placeholders as gemma3
from model_zoo.models.gemma4 import placeholders as gemma4
from model_zoo.models.glm4v import placeholders as glm4v
from model_zoo.models.hunyuan import placeholders as hunyuan
from model_zoo.models.idefics3 import placeholders as idefics3
from model_zoo.models.internvl import placeholders as internvl
from model_zoo.models.kimivl import placeholders as kimivl
from model_zoo.models.lfm2 import placeholders as lfm2
from model_zoo.models.llama4 import placeholders as llama4
from model_zoo.models.llava import placeholders as llava
from model_zoo.models.minicpmv import placeholders as minicpmv
from model_zoo.models.minimax_m3 import placeholders as minimax
from model_zoo.models.mistral3 import placeholders as mistral3
from model_zoo.models.mllama import placeholders as mllama
from model_zoo.models.muse_glimmer import placeholders as muse
from model_zoo.models.paddleocr import placeholders as paddleocr
from model_zoo.models.qwen25vl import placeholders as exaone
from model_zoo.models.step3vl import placeholders as step3vl
from model_zoo.multimodal import qwen_placeholders as qwen
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
from tests.families import vision_references as references
from tests.families.gemma_families import EXPERTS, KEYS_AS_VALUES, SHARED_KEYS
from tests.families.qwen_families import LONG_SECTIONS, QWEN35_EXPERTS
from tests.families.text_family import rope
from tests.families.vision_agreement import FLAVOURS, Expected, VisionPair, make_vision_pair
from tests.families.vision_configs import (
    GEMMA4_TOKENS,
    GLM_TOKENS,
    GRANITE,
    HEADS_OF_16,
    LFM2_CUTTING,
    QWEN_TOKENS,
    SIDE,
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
    qwen35_config,
)
from tests.tiny_models import Save, save_pretrained, tiny_tokenizer

CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
SQUARE = {"size": {"height": SIDE, "width": SIDE}}


@dataclass(frozen=True)
class VisionFamily:
    """A family of vision models.

    make: a configuration from settings. configs: by name, the settings of each.
    expected: logits of `transformers`. special: tokens behind those of the tiny tokenizer.
    spelled: what the template writes for an image. processor: settings of the image processor.
    flavours: of the files; `engine_flavour` that of `test_vision_engine.py`, None to skip.
    writer: writes and loads a model that `transformers` does not have, with the settings of a
    configuration, instead of `make`'s. save: as of `write_tiny`.
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
    writer: Callable[..., VisionPair] | None = None
    save: Save = save_pretrained

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
        if self.writer is not None:
            return self.writer(folder, files, **(self.configs[config] | changes))
        return make_vision_pair(
            self.make(**(self.configs[config] | changes)),
            folder,
            self.expected,
            special=self.special,
            spelled=self.spelled,
            flavour=flavour or self.flavours[0],
            settings=dict(self.processor if processor is None else processor),
            files=files,
            save=self.save,
        )


GEMMA4_SMALL = SHARED_KEYS | {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": tiny_tokenizer().get_vocab_size() + len(GEMMA4_TOKENS),
    "use_bidirectional_attention": None,
}
GEMMA4_ROW = {
    "make": gemma4_config,
    "expected": references.gemma4,
    "special": GEMMA4_TOKENS,
    "spelled": gemma4.PLACE,
    "processor": {"max_soft_tokens": 12, "patch_size": 4, "pooling_kernel_size": 3},
    "flavours": FLAVOURS,
    "grids": [(2, 5), (5, 2)],
}
GLM_EXPERTS = {
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
GLM_OCR_HEADS = {"head_dim": 32} | rope(1e4, mrope_section=[4, 6, 6])
GLM_ROW = {
    "expected": references.qwen,
    "special": GLM_TOKENS,
    "spelled": glm4v.TEXTS.spelled,
    "processor": {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 60}},
    "grids": [(2, 5), (5, 2)],
}
LLAVA_ROW = {
    "make": llava_config,
    "expected": references.squares,
    "special": llava.TEXTS.reserved,
    "spelled": llava.PLACE + "\n",
}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2}

VISION_MODELS: Mapping[str, VisionFamily] = {
    "deepseekocr": VisionFamily(
        deepseekocr_families.config,
        {"plain": {}},
        deepseekocr_families.expected,
        special=deepseekocr_families.SPECIAL,
        spelled=deepseekocr.TEXTS.spelled,
        flavours=FLAVOURS,
        grids=[(2, 4), (4, 2)],
        save=deepseekocr_families.save_deepseekocr,
    ),
    "deepseekocr2": VisionFamily(
        deepseekocr2_families.config,
        {"plain": {"text": {"max_position_embeddings": 2048}}},
        deepseekocr2_families.expected,
        engine_flavour=None,
        special=deepseekocr_families.SPECIAL,
        spelled=deepseekocr.TEXTS.spelled,
    ),
    "dots_ocr": VisionFamily(
        configs={"plain": {}},
        make=PreTrainedConfig,
        expected=kimivl_families.expected,
        special=dots.TEXTS.reserved,
        spelled=dots.TEXTS.spelled,
        grids=[(2, 5), (5, 2)],
        writer=dots_families.write_model,
    ),
    "exaone45": VisionFamily(
        exaone45_config,
        {"plain": {}},
        references.exaone45,
        special=exaone.TEXTS.reserved,
        spelled=exaone.TEXTS.spelled,
        processor={"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
        grids=[(2, 5), (5, 2)],
    ),
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
            "plain": {"text": KEYS_AS_VALUES},
            "images_larger_than_the_window": {"text": KEYS_AS_VALUES | {"sliding_window": 5}},
            "experts": {"text": EXPERTS | KEYS_AS_VALUES},
        },
        **GEMMA4_ROW,
    ),
    "gemma4_small": VisionFamily(
        configs={"plain": {"text": GEMMA4_SMALL}}, engine_flavour="ollama", **GEMMA4_ROW
    ),
    "gemma4_unified": VisionFamily(
        gemma4_unified_config,
        {"plain": {"text": KEYS_AS_VALUES}},
        references.gemma4_unified,
        engine_flavour=None,
        **{key: GEMMA4_ROW[key] for key in ("special", "spelled", "processor", "grids")},
    ),
    "glm4v": VisionFamily(
        glm4v_config,
        {
            "plain": {},
            "experts": {"make": Glm4vMoeConfig, "text": GLM_EXPERTS},
        },
        **GLM_ROW,
    ),
    "glm_ocr": VisionFamily(
        glm4v_config,
        {"plain": {"make": GlmOcrConfig, "text": GLM_OCR_HEADS}},
        flavours=FLAVOURS,
        engine_flavour=None,
        **GLM_ROW,
    ),
    "hunyuan_vl": VisionFamily(
        hunyuan_vl_config,
        {"plain": {}},
        references.hunyuan,
        special=hunyuan.TEXTS.reserved,
        spelled=hunyuan.START + hunyuan.PLACE + hunyuan.END,
        processor={"min_pixels": 16 * 16 * 2, "max_pixels": 16 * 16 * 30},
    ),
    "idefics3": VisionFamily(
        idefics3_config,
        {"plain": {}, "idefics3": {"make": Idefics3Config}},
        references.idefics3,
        special=idefics3.TEXTS.reserved,
        spelled=idefics3.PLACE,
        processor={"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        grids=[(2, 3), (3, 2)],
    ),
    "internvl": VisionFamily(
        internvl_config,
        {
            "plain": {},
            "llama": {"text": "llama"},
            "gpt_oss": {"text": "gpt_oss", "sizes": GPT_OSS},
            "phi3": {"text": "phi3", "sizes": {"pad_token_id": 0}},
            "qwen3": {"text": "qwen3", "sizes": HEADS_OF_16},
            "qwen3moe": {
                "text": "qwen3_moe",
                "sizes": HEADS_OF_16 | MOE | {"moe_intermediate_size": 32},
            },
        },
        references.tiles,
        special=internvl.TEXTS.reserved,
        spelled=internvl.PLACE + "\n",
        processor=SQUARE | {"max_patches": 6},
        grids=[(1, 2), (2, 1)],
    ),
    "kimivl": VisionFamily(
        configs={"plain": {}, "k25": {"kind": "kimik25"}},
        make=PreTrainedConfig,
        expected=kimivl_families.expected,
        special=kimivl.TEXTS.reserved,
        spelled=kimivl.TEXTS.spelled,
        grids=[(2, 3), (3, 2)],
        writer=kimivl_families.write_model,
    ),
    "lfm2": VisionFamily(
        lfm2_config,
        {"plain": {}},
        references.lfm2,
        special=lfm2.TEXTS.reserved,
        spelled=lfm2.PLACE,
        processor=LFM2_CUTTING,
        flavours=FLAVOURS,
        grids=[(60, 130), (150, 70)],
    ),
    "lighton": VisionFamily(
        lighton_config,
        {"plain": {}},
        references.mistral3,
        special=QWEN_TOKENS,
        spelled=qwen.PLACE,
        processor={"size": {"longest_edge": 84}},
        engine_flavour=None,
        grids=[(4, 7), (7, 4)],
    ),
    "llama4": VisionFamily(
        llama4_config,
        {"plain": {}},
        references.tiles,
        special=llama4.TEXTS.reserved,
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
        {"plain": {}, "llama": {"text": "llama"}, "qwen2": {"text": "qwen2"}, "granite": GRANITE},
        references.llava_next,
        special=llava.TEXTS.reserved,
        spelled=llava.PLACE + "\n",
        processor=CROPPED,
        grids=[(60, 130), (150, 70)],
    ),
    "minicpmv": VisionFamily(
        configs={
            "plain": {},
            "enclosed_slices_and_scaled_embeddings": {"version": 2, "text": "minicpm"},
        },
        make=PreTrainedConfig,
        expected=minicpmv_families.expected,
        special=minicpmv.TEXTS.reserved,
        spelled=minicpmv.TEXTS.spelled,
        grids=[(60, 130), (150, 70)],
        writer=minicpmv_families.write_model,
    ),
    "minicpmv46": VisionFamily(
        minicpmv4_6_families.config,
        {"plain": {}},
        minicpmv4_6_families.expected,
        special=minicpmv.MERGED_TEXTS.reserved,
        spelled=minicpmv.MERGED_TEXTS.spelled,
        processor={"scale_resolution": minicpmv4_6_families.SIDE},
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
    "moondream": VisionFamily(
        configs={"plain": {}},
        make=PreTrainedConfig,
        expected=moondream_families.expected,
        special=(llava.PLACE,),
        spelled=llava.MOONDREAM_TEXTS.spelled,
        writer=moondream_families.write_model,
    ),
    "paddleocr": VisionFamily(
        paddleocr_config,
        {"plain": {}},
        references.paddleocr,
        special=paddleocr.TEXTS.reserved,
        spelled=paddleocr.TEXTS.spelled,
        processor={"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
        grids=[(2, 5), (5, 2)],
    ),
    "minimax_m3": VisionFamily(
        minimax_families.config,
        {"plain": {}},
        references.exaone45,
        special=minimax.TEXTS.reserved,
        spelled=minimax.TEXTS.spelled,
        processor={"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 30},
        grids=[(2, 5), (5, 2)],
    ),
    "muse_glimmer": VisionFamily(
        muse_families.config,
        {"plain": {}},
        muse_families.expected,
        special=muse.TEXTS.reserved,
        spelled=muse.PLACE,
        grids=[(2, 4), (6, 3)],
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
    "qwen35": VisionFamily(
        qwen35_config,
        {
            "plain": {},
            "experts": {"make": Qwen3_5MoeConfig, "text": QWEN35_EXPERTS | LONG_SECTIONS},
        },
        references.qwen35,
        special=QWEN_TOKENS,
        spelled=qwen.START + qwen.PLACE + qwen.END,
        processor={"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 30}},
        flavours=FLAVOURS,
    ),
    "qwen3vl": VisionFamily(
        qwen3vl_config,
        {
            "plain": {},
            "experts": {"make": Qwen3VLMoeConfig, "text": MOE | {"moe_intermediate_size": 48}},
        },
        references.qwen,
        special=QWEN_TOKENS,
        spelled=qwen.START + qwen.PLACE + qwen.END,
        processor={"size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 30}},
        flavours=FLAVOURS,
    ),
    "step3vl": VisionFamily(
        step3vl_families.config,
        {"plain": {}},
        step3vl_families.expected,
        special=step3vl.TEXTS.reserved,
        spelled=step3vl.PLACE,
        processor={"max_image_size": 150},
        engine_flavour=None,
        grids=[(2, 3), (3, 2)],
    ),
}
