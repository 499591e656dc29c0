"""The table of placeholder tokens: our placeholders and image processor of each vision family, and
the whole processor in `transformers`."""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
    HunYuanVLImageProcessorPil,
)
from transformers.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.llama4.processing_llama4 import Llama4Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    MllamaProcessor,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.step3p7.processing_step3p7 import Step3p7Processor
from transformers.models.unlimited_ocr.processing_unlimited_ocr import UnlimitedOcrProcessor

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import ImagePart, ImageTexts, Message
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.images.bounded_area import Growth
from model_zoo.images.decode import DecodingLimits
from model_zoo.images.normalise import CLIP, STANDARD
from model_zoo.images.prepared import ImageProcessor
from model_zoo.images.slicing import Slicing
from model_zoo.models.deepseekocr import placeholders as deepseekocr
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor as OcrTiles
from model_zoo.models.gemma3 import placeholders as gemma3
from model_zoo.models.gemma3.image_processor import Gemma3Processor as GemmaSquare
from model_zoo.models.gemma4 import placeholders as gemma4
from model_zoo.models.gemma4.image_processor import Gemma4Processor as GemmaShape
from model_zoo.models.glm4v import placeholders as glm4v
from model_zoo.models.hunyuan import placeholders as hunyuan
from model_zoo.models.hunyuan.image_processor import HunyuanProcessor
from model_zoo.models.idefics3 import placeholders as idefics3
from model_zoo.models.idefics3.image_processor import Idefics3Processor as IdeficsTiles
from model_zoo.models.internvl import placeholders as internvl
from model_zoo.models.internvl.image_processor import InternVLProcessor as InternTiles
from model_zoo.models.lfm2 import placeholders as lfm2
from model_zoo.models.lfm2.image_processor import Lfm2Processor as Lfm2Tiles
from model_zoo.models.llama4 import placeholders as llama4
from model_zoo.models.llama4.image_processor import Llama4Processor as LlamaTiles
from model_zoo.models.llava import placeholders as llava
from model_zoo.models.llava.image_processor import LlavaProcessor as LlavaSquare
from model_zoo.models.llava.image_processor_next import LlavaNextProcessor as LlavaTiles
from model_zoo.models.minicpmv import placeholders as minicpmv
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.models.minimax_m3 import placeholders as minimax
from model_zoo.models.mistral3 import placeholders as pixtral
from model_zoo.models.mistral3.image_processor import PixtralProcessor as PixtralShape
from model_zoo.models.mllama import placeholders as mllama
from model_zoo.models.mllama.image_processor import MllamaProcessor as MllamaTiles
from model_zoo.models.paddleocr import placeholders as paddleocr
from model_zoo.models.qwen25vl import placeholders as exaone
from model_zoo.models.step3vl import placeholders as step3vl
from model_zoo.models.step3vl.image_processor import Step3VLProcessor as StepWindows
from model_zoo.multimodal import qwen_placeholders as qwen
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.placeholders import Placeholders
from model_zoo.multimodal.vision_model import VisionModel
from model_zoo.tokenizers.tokenizer import Tokenizer
from tests.parity.vision.image_stand_ins import Lfm2Parts, OcrViews, StepViews, Tiles
from tests.vision_prompts import (
    TEMPLATE,
    as_transformers,
    library_tokenizer,
    own_tokenizer,
    pictures,
    png,
)

BOS = "<|begin_of_text|>"
WIDE, TALL = ImagePart(png(40, 150)), ImagePart(png(170, 60, seed=1))
SMALL = ImagePart(png(20, 20, seed=2))

CONVERSATIONS = {
    "one image": [Message("user", (WIDE, "What is this?"))],
    "an image alone": [Message("user", (TALL,))],
    "an image behind the text": [Message("user", ("See:", WIDE))],
    "an image in the middle": [Message("user", ("Before\n", TALL, "\n\nafter."))],
    "spaces around an image": [Message("user", ("one ", SMALL, " two"))],
    "two images in one message": [Message("user", (WIDE, TALL, "Compare."))],
    "two images with text between": [Message("user", ("A:", WIDE, "\nB:\n", TALL, "!"))],
    "images in two turns": [
        Message("system", "Be brief."),
        Message("user", ("This?", WIDE)),
        Message("assistant", "A hill."),
        Message("user", (TALL, "And this?")),
    ],
    "the same image twice": [
        Message("user", (SMALL, "This?")),
        Message("assistant", "A dot."),
        Message("user", (SMALL, "And\nthis?")),
    ],
    "text alone": [Message("user", "hello\n\n\nthere")],
}


@dataclass(frozen=True)
class Family:
    """`placement` makes placeholders, which are written as `texts`; `place`: the placeholder
    token; `theirs` makes the library's processor of a tokenizer; `named`: its special tokens."""

    texts: ImageTexts
    placement: Callable[[Tokenizer], Placeholders]
    processor: ImageProcessor
    theirs: Callable[[Any], Any]
    place: str
    named: dict[str, str] = field(default_factory=dict)

    @property
    def reserved(self) -> tuple[str, ...]:
        return self.texts.reserved


@cache
def pixtral_module() -> Any:
    """Imports the module without another one that needs torchvision and is not used here."""
    package = "transformers.models.pixtral"
    neighbour = ModuleType(f"{package}.image_processing_pixtral")
    neighbour.get_resize_output_image_size = None  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {neighbour.__name__: neighbour}):
        return importlib.import_module(f"{package}.processing_pixtral")


def pixtral_processor(tokenizer: Any) -> Any:
    images = PixtralImageProcessorPil(size={"longest_edge": 140}, patch_size=28)
    kind = pixtral_module().PixtralProcessor
    return kind(images, tokenizer, patch_size=14, spatial_merge_size=2)


def lighton_processor(tokenizer: Any) -> Any:
    """With a longest edge for which the sides of all pictures are an even number of patches;
    otherwise it leaves out a row or a column (see PixtralProcessor)."""
    images = PixtralImageProcessorPil(size={"longest_edge": 80}, patch_size=14)
    return unchecked(LightOnOcrProcessor, images, tokenizer, patch_size=14)


def unchecked(kind: Any, *parts: Any, **options: Any) -> Any:
    """A processor that accepts parts of any class."""
    processor = object.__new__(kind)
    processor.check_argument_for_proper_class = lambda *_: None
    kind.__init__(processor, *parts, **options)
    return processor


def llama4_processor(tokenizer: Any) -> Any:
    processor = unchecked(Llama4Processor, None, tokenizer, patch_size=14, chat_template=None)
    processor.image_processor = Tiles(LLAMA_TILES)
    return processor


def lfm2_processor(tokenizer: Any) -> Any:
    processor = unchecked(Lfm2VlProcessor, None, tokenizer, chat_template=None)
    processor.image_processor = Lfm2Parts()
    return processor


def gemma4_processor(tokenizer: Any) -> Any:
    options = {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3}
    images = Gemma4ImageProcessorPil(**options)
    return unchecked(Gemma4Processor, SimpleNamespace(), images, tokenizer, SimpleNamespace())


def qwen_processor(kind: Any, tokenizer: Any) -> Any:
    size = {"shortest_edge": QWEN.min_pixels, "longest_edge": QWEN.max_pixels}
    images = Qwen2VLImageProcessorPil(size=size, patch_size=14, merge_size=2)
    return unchecked(kind, images, tokenizer, SimpleNamespace())


def glm_processor(tokenizer: Any) -> Any:
    size = {"shortest_edge": 2 * GLM.min_pixels, "longest_edge": 2 * GLM.max_pixels}
    images = Glm4vImageProcessorPil(size=size)
    return unchecked(Glm4vProcessor, images, tokenizer, SimpleNamespace())


def hunyuan_processor(tokenizer: Any) -> Any:
    size = {"shortest_edge": QWEN.min_pixels, "longest_edge": QWEN.max_pixels}
    return unchecked(
        HunYuanVLProcessor, HunYuanVLImageProcessorPil(size=size, patch_size=14), tokenizer
    )


def paddle_processor(tokenizer: Any) -> Any:
    size = {"shortest_edge": PADDLE.min_pixels, "longest_edge": PADDLE.max_pixels}
    return unchecked(PaddleOCRVLProcessor, PaddleOCRVLImageProcessorPil(size=size), tokenizer)


def minicpmv46_processor(tokenizer: Any) -> Any:
    images = MiniCPMV4_6ImageProcessorPil(scale_resolution=56, patch_size=7, use_image_id=False)
    videos = SimpleNamespace(slice_mode=True, downsample_mode="16x")
    return unchecked(MiniCPMV4_6Processor, images, videos, tokenizer)


def deepseekocr_processor(tokenizer: Any) -> Any:
    processor = unchecked(UnlimitedOcrProcessor, None, tokenizer, patch_size=4)
    processor.image_token, processor.image_token_id = (
        deepseekocr.PLACE,
        tokenizer.convert_tokens_to_ids(deepseekocr.PLACE),
    )
    processor.image_processor = OcrViews(OCR_TILES)
    return processor


def llava_processor(tokenizer: Any) -> Any:
    images = CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=SQUARE)
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, patch_size=14, **options)


def llava_next_processor(tokenizer: Any) -> Any:
    options = {"size": {"shortest_edge": 56}, "crop_size": SQUARE}
    images = LlavaNextImageProcessorPil(**options, image_grid_pinpoints=CANVASES)
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(images, tokenizer, patch_size=14, **options)


def idefics3_processor(tokenizer: Any) -> Any:
    sizes = {"size": {"longest_edge": 150}, "max_image_size": {"longest_edge": 56}}
    return Idefics3Processor(Idefics3ImageProcessorPil(**sizes), tokenizer, image_seq_len=4)


def internvl_processor(tokenizer: Any) -> Any:
    images = GotOcr2ImageProcessorPil(size=SQUARE)
    return unchecked(InternVLProcessor, images, tokenizer, SimpleNamespace(), image_seq_length=4)


OCR_TILES = OcrTiles(side=64, tile=40, patch=4)
LLAMA_TILES = LlamaTiles(side=56, tile_rows=4)
LFM2_TILES = Lfm2Tiles(7, 2, 4, 20, tile=56, min_tiles=2, max_tiles=10, tolerance=1.5)
QWEN = BoundedProcessor(14, 2, min_pixels=3136, max_pixels=28 * 28 * 12, normalisation=CLIP)
GLM = replace(QWEN, grows=Growth.BOTH)
PADDLE = replace(QWEN, grows=Growth.IN_TURN)
STEP_WINDOWS = StepWindows(side=64, tile=48, patch=4)
SLICES = MiniCPMVProcessor(Slicing(side=56, unit=28), patch=7, part_rows=None)
SQUARE = {"height": 56, "width": 56}
CANVASES = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
FAMILIES = {
    "deepseekocr": Family(
        deepseekocr.TEXTS,
        deepseekocr.deepseekocr_placeholders,
        OCR_TILES,
        deepseekocr_processor,
        deepseekocr.PLACE,
    ),
    "exaone45": Family(
        exaone.TEXTS,
        exaone.exaone_placeholders,
        QWEN,
        partial(qwen_processor, Exaone4_5_Processor),
        exaone.PLACE,
    ),
    "gemma3": Family(
        gemma3.TEXTS,
        gemma3.gemma3_placeholders,
        GemmaSquare(56, 9, normalisation=STANDARD),
        lambda t: Gemma3Processor(Gemma3ImageProcessorPil(size=SQUARE), t, image_seq_length=9),
        gemma3.PLACE,
        {
            "image_token": gemma3.PLACE,
            "boi_token": gemma3.START,
            "eoi_token": gemma3.END,
        },
    ),
    "gemma4": Family(
        gemma4.TEXTS,
        gemma4.gemma4_placeholders,
        GemmaShape(4, 3, 70),
        gemma4_processor,
        gemma4.PLACE,
        {
            "image_token": gemma4.PLACE,
            "boi_token": gemma4.START,
            "eoi_token": gemma4.END,
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    ),
    "glm4v": Family(glm4v.TEXTS, glm4v.glm_placeholders, GLM, glm_processor, glm4v.PLACE),
    "hunyuan_vl": Family(
        hunyuan.TEXTS,
        hunyuan.HunyuanPlaceholders,
        HunyuanProcessor(QWEN),
        hunyuan_processor,
        hunyuan.PLACE,
        {
            "image_token": hunyuan.PLACE,
            "image_start_token": hunyuan.START,
            "image_end_token": hunyuan.END,
        },
    ),
    "minicpmv46": Family(
        minicpmv.MERGED_TEXTS,
        partial(minicpmv.minicpmv46_placeholders, images=SLICES),
        SLICES,
        minicpmv46_processor,
        minicpmv.PAD,
        {
            "image_token": minicpmv.PAD,
            "video_token": "<|video_pad|>",
            "image_start_token": minicpmv.START,
            "image_end_token": minicpmv.END,
            "slice_start_token": minicpmv.SLICE,
            "slice_end_token": minicpmv.SLICE_END,
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
    ),
    "minimax_m3": Family(
        minimax.TEXTS,
        minimax.minimax_placeholders,
        QWEN,
        partial(qwen_processor, MiniMaxM3VLProcessor),
        minimax.PLACE,
    ),
    "paddleocr": Family(
        paddleocr.TEXTS,
        paddleocr.paddle_placeholders,
        PADDLE,
        paddle_processor,
        paddleocr.PLACE,
        {"image_token": paddleocr.PLACE},
    ),
    "pixtral": Family(
        pixtral.TEXTS,
        pixtral.PixtralPlaceholders,
        PixtralShape(140, 14, 2),
        pixtral_processor,
        pixtral.PLACE,
    ),
    "qwen25vl": Family(
        qwen.TEXTS,
        qwen.qwen_placeholders,
        QWEN,
        partial(qwen_processor, Qwen2_5_VLProcessor),
        qwen.PLACE,
    ),
    "qwen3vl": Family(
        qwen.TEXTS,
        qwen.qwen_placeholders,
        QWEN,
        partial(qwen_processor, Qwen3VLProcessor),
        qwen.PLACE,
    ),
    "lfm2": Family(
        lfm2.TEXTS,
        partial(lfm2.Lfm2Placeholders, processor=LFM2_TILES),
        LFM2_TILES,
        lfm2_processor,
        lfm2.PLACE,
    ),
    "lighton": Family(
        pixtral.LIGHTON_TEXTS,
        pixtral.lighton_placeholders,
        PixtralShape(80, 14, 2),
        lighton_processor,
        qwen.PLACE,
        {
            "image_token": qwen.PLACE,
            "image_break_token": "<|vision_pad|>",
            "image_end_token": qwen.END,
        },
    ),
    "llama4": Family(
        llama4.TEXTS,
        llama4.Llama4Placeholders,
        LLAMA_TILES,
        llama4_processor,
        llama4.PLACE,
    ),
    "llava": Family(
        llava.TEXTS,
        llava.llava_placeholders,
        LlavaSquare(56, 16),
        llava_processor,
        llava.PLACE,
    ),
    "llava_next": Family(
        llava.TEXTS,
        llava.llava_placeholders,
        LlavaTiles(56, 4, tuple((high, wide) for high, wide in CANVASES)),
        llava_next_processor,
        llava.PLACE,
    ),
    "idefics3": Family(
        idefics3.TEXTS,
        idefics3.Idefics3Placeholders,
        IdeficsTiles(56, 150, 4),
        idefics3_processor,
        idefics3.PLACE,
    ),
    "internvl": Family(
        internvl.TEXTS,
        internvl.internvl_placeholders,
        InternTiles(56, 4, CLIP),
        internvl_processor,
        internvl.PLACE,
        {
            "start_image_token": internvl.START,
            "context_image_token": internvl.PLACE,
            "end_image_token": internvl.END,
            "video_token": internvl.OTHER,
        },
    ),
    "step3vl": Family(
        step3vl.TEXTS,
        partial(step3vl.Step3VLPlaceholders, images=STEP_WINDOWS),
        STEP_WINDOWS,
        lambda t: unchecked(Step3p7Processor, StepViews(STEP_WINDOWS), t),
        step3vl.PLACE,
    ),
    "mllama": Family(
        mllama.TEXTS,
        partial(mllama.MllamaPlaceholders, tiles=4),
        MllamaTiles(side=56, tile_rows=17),
        lambda t: MllamaProcessor(MllamaImageProcessorPil(size=SQUARE, max_image_tiles=4), t),
        mllama.PLACE,
    ),
}


def model_of(
    family: Family, source: str = TEMPLATE, special: Sequence[str] = (), **tokens: str
) -> ChatModel:
    tokenizer = own_tokenizer((BOS, *family.reserved, *special))
    placement = family.placement(tokenizer)
    vision = VisionModel(
        tower=None,  # type: ignore[arg-type]
        weight_bytes=0,
        processor=family.processor,
        placeholders=placement,
        name=b"tower",
        limits=DecodingLimits(),
    )
    facts: Any = SimpleNamespace(name="tiny")
    decoder: Any = SimpleNamespace(context_length=4096)
    template = ChatTemplate(source.replace("IMAGE", placement.texts.spelled), **tokens)
    return ChatModel(decoder, tokenizer, template, facts, vision=vision)


def expected(family: Family, messages: Sequence[Message]) -> tuple[list[int], Any]:
    tokenizer = library_tokenizer((BOS, *family.reserved), bos_token=BOS, **family.named)
    source = TEMPLATE.replace("IMAGE", family.texts.spelled)
    processor = family.theirs(tokenizer)
    if family is FAMILIES["mllama"]:
        source = BOS + source  # the processor itself would put it elsewhere
    processor.chat_template = source
    text = processor.apply_chat_template(as_transformers(messages), add_generation_prompt=True)
    shown = pictures(messages)
    nested = [shown] if family is FAMILIES["mllama"] else shown
    made = processor(text=[text], images=nested if shown else None, add_special_tokens=False)
    ids = np.asarray(made["input_ids"][0]).tolist()
    if family is FAMILIES["mllama"]:
        assert ids.pop(0) == tokenizer.convert_tokens_to_ids(BOS)
    return ids, made


def places(prompt: Prompt) -> list[int]:
    return [p for span in prompt.spans for p in range(span.start, span.end)]
