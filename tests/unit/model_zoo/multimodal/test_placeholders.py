"""Images in prompts: their positions, protection against forgery, and refusals."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from model_zoo.chat.chat_template import ChatTemplate
from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import ChatModel, Prompt
from model_zoo.images.decode import DecodingLimits
from model_zoo.images.normalise import CLIP
from model_zoo.images.slicing import Slicing
from model_zoo.models.deepseekocr import placeholders as deepseekocr
from model_zoo.models.deepseekocr.image_processor import DeepseekOCRProcessor
from model_zoo.models.dots_ocr import placeholders as dots
from model_zoo.models.gemma3 import placeholders as gemma3
from model_zoo.models.gemma3.image_processor import Gemma3Processor
from model_zoo.models.gemma4 import placeholders as gemma4
from model_zoo.models.gemma4.image_processor import Gemma4Processor
from model_zoo.models.idefics3 import placeholders as idefics3
from model_zoo.models.idefics3.image_processor import Idefics3Processor
from model_zoo.models.internvl import placeholders as internvl
from model_zoo.models.internvl.image_processor import InternVLProcessor
from model_zoo.models.kimivl import placeholders as kimivl
from model_zoo.models.kimivl.image_processor import KimiVLProcessor
from model_zoo.models.lfm2 import placeholders as lfm2
from model_zoo.models.lfm2.image_processor import Lfm2Processor
from model_zoo.models.llama4 import placeholders as llama4
from model_zoo.models.llama4.image_processor import Llama4Processor
from model_zoo.models.llava import placeholders as llava
from model_zoo.models.llava.image_processor import LlavaProcessor
from model_zoo.models.minicpmv import placeholders as minicpmv
from model_zoo.models.minicpmv.image_processor import MiniCPMVProcessor
from model_zoo.models.minimax_m3 import placeholders as minimax
from model_zoo.models.mistral3 import placeholders as pixtral
from model_zoo.models.mistral3.image_processor import PixtralProcessor
from model_zoo.models.mllama import placeholders as mllama
from model_zoo.models.mllama.image_processor import MllamaProcessor
from model_zoo.models.muse_glimmer import placeholders as muse
from model_zoo.models.muse_glimmer.image_processor import MuseProcessor
from model_zoo.models.step3vl import placeholders as step3vl
from model_zoo.models.step3vl.image_processor import Step3VLProcessor
from model_zoo.multimodal import qwen_placeholders as qwen
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.image_tags import tagged, with_images
from model_zoo.multimodal.placeholders import PlaceholderRows, Placeholders
from model_zoo.multimodal.prompt_layout import lay_out
from model_zoo.multimodal.vision_model import VisionModel
from runtime.errors import ModelFileError, PromptTooLongError, RequestError
from tests.unit.model_zoo.tokenizers.tiny_vocabulary import CONTROL, NORMAL, USER_DEFINED
from tests.vision_prompts import TEMPLATE, TEXT_TEMPLATE, own_tokenizer, png

BOS = "<|begin_of_text|>"
LFM2 = Lfm2Processor(7, 2, 4, 20, tile=28, min_tiles=1, max_tiles=1, tolerance=1.0)
ONE, TWO = ImagePart(png(40, 60)), ImagePart(png(60, 40, seed=1))
STEP = Step3VLProcessor(side=32, tile=16, patch=2)
SLICES = MiniCPMVProcessor(Slicing(side=28, unit=7), patch=7, part_rows=4)
PLACEMENTS: dict[str, Any] = {
    "deepseekocr": deepseekocr.deepseekocr_placeholders,
    "dots_ocr": dots.dots_placeholders,
    "gemma3": gemma3.gemma3_placeholders,
    "gemma4": gemma4.gemma4_placeholders,
    "pixtral": pixtral.PixtralPlaceholders,
    "qwen": qwen.qwen_placeholders,
    "llama4": llama4.Llama4Placeholders,
    "llava": llava.llava_placeholders,
    "idefics3": idefics3.Idefics3Placeholders,
    "internvl": internvl.internvl_placeholders,
    "kimivl": kimivl.kimivl_placeholders,
    "lfm2": lambda tokenizer: lfm2.Lfm2Placeholders(tokenizer, LFM2),
    "minicpmv": partial(minicpmv.MiniCPMVPlaceholders, images=SLICES, enclosed=False),
    "minimax_m3": minimax.minimax_placeholders,
    "mllama": lambda tokenizer: mllama.MllamaPlaceholders(tokenizer, 4),
    "muse_glimmer": muse.muse_placeholders,
    "step3vl": lambda tokenizer: step3vl.Step3VLPlaceholders(tokenizer, STEP),
}
PROCESSORS: dict[str, Any] = {
    "deepseekocr": DeepseekOCRProcessor(side=64, tile=40, patch=4),
    "dots_ocr": BoundedProcessor(14, 2, min_pixels=784, max_pixels=7840, normalisation=CLIP),
    "gemma3": Gemma3Processor(28, 4),
    "gemma4": Gemma4Processor(4, 3, 12),
    "pixtral": PixtralProcessor(140, 14, 2),
    "qwen": BoundedProcessor(14, 2, min_pixels=784, max_pixels=7840, normalisation=CLIP),
    "llama4": Llama4Processor(side=28, tile_rows=4),
    "llava": LlavaProcessor(28, 4),
    "idefics3": Idefics3Processor(28, 84, 4),
    "internvl": InternVLProcessor(28, 4, CLIP),
    "kimivl": KimiVLProcessor(patch=7, merge=2),
    "lfm2": LFM2,
    "minicpmv": SLICES,
    "minimax_m3": BoundedProcessor(14, 2, min_pixels=3136, max_pixels=7840, normalisation=CLIP),
    "mllama": MllamaProcessor(side=28, tile_rows=5),
    "muse_glimmer": MuseProcessor(unit=14),
    "step3vl": STEP,
}
RESERVED = {
    "deepseekocr": deepseekocr.TEXTS.reserved,
    "dots_ocr": dots.TEXTS.reserved,
    "minimax_m3": minimax.TEXTS.reserved[:3],
    "gemma3": gemma3.TEXTS.reserved,
    "gemma4": gemma4.TEXTS.reserved,
    "pixtral": pixtral.TEXTS.reserved,
    "qwen": qwen.TEXTS.reserved,
    "llama4": llama4.TEXTS.reserved,
    "llava": llava.TEXTS.reserved,
    # The names of some tiles of ONE are tokens of this vocabulary, others are text.
    "idefics3": (
        *idefics3.TEXTS.reserved[:3],
        idefics3.tile(1, 1),
        idefics3.tile(2, 1),
    ),
    "internvl": internvl.TEXTS.reserved,
    "kimivl": kimivl.TEXTS.reserved,
    "lfm2": (lfm2.START, lfm2.PLACE, lfm2.END),
    "minicpmv": minicpmv.TEXTS.reserved,
    "mllama": mllama.TEXTS.reserved,
    "muse_glimmer": muse.TEXTS.reserved,
    "step3vl": step3vl.TEXTS.reserved,
}
OPTIONAL = (
    gemma3.PLACE,
    *gemma4.OTHERS,
    idefics3.WHOLE,
    idefics3.tile(1, 1),
    idefics3.tile(2, 1),
    internvl.OTHER,
    kimivl.START,
    kimivl.CONTENT,
    kimivl.END,
    *qwen.OTHERS,
)
every_family = pytest.mark.parametrize("family", PLACEMENTS)


def model_of(
    family: str,
    *,
    source: str = TEMPLATE,
    kind: int = CONTROL,
    most_images: int | None = None,
    context: int = 4096,
    special: Sequence[str] = (),
) -> ChatModel:
    tokenizer = own_tokenizer((BOS, *RESERVED[family], *special), kind)
    placement: Placeholders = PLACEMENTS[family](tokenizer)
    tower: Any = None
    limits = DecodingLimits()
    vision = VisionModel(tower, 0, PROCESSORS[family], placement, b"tower", limits, most_images)
    facts: Any = SimpleNamespace(name="tiny")
    decoder: Any = SimpleNamespace(context_length=context)
    template = ChatTemplate(source.replace("IMAGE", placement.texts.spelled))
    return ChatModel(decoder, tokenizer, template, facts, vision=vision)


def reserved_in(model: ChatModel, family: str, prompt: Prompt) -> list[str]:
    ids = {model.tokenizer.id_of(text): text for text in RESERVED[family]}
    return [ids[token] for token in prompt.tokens if token in ids]


def user(*content: str | ImagePart) -> Sequence[Message]:
    return [Message("user", content)]


@every_family
@pytest.mark.parametrize("source", [TEMPLATE, TEXT_TEMPLATE], ids=["parts", "texts"])
@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, NORMAL])
def test_no_text_becomes_a_token_of_an_image(family: str, source: str, kind: int) -> None:
    model = model_of(family, source=source, kind=kind)
    honest = model.prepare([*user("x", ONE, "y"), Message("assistant", "z"), *user("w")])
    for text in RESERVED[family]:
        for forged in (text, text[:3] + text + text[3:], f"{text}\n{text}", text.upper()):
            talk = [*user(forged, ONE, forged), Message("assistant", forged), *user(forged)]
            prompt = model.prepare(talk)
            assert reserved_in(model, family, prompt) == reserved_in(model, family, honest)
            assert len(prompt.spans) == len(honest.spans)


@every_family
def test_image_tokens_cannot_be_assembled_from_texts(family: str) -> None:
    model = model_of(family)
    honest = reserved_in(model, family, model.prepare(user("x", ONE, "y")))
    for text in RESERVED[family]:
        for cut in range(1, len(text)):
            forged = model.prepare(user(text[:cut], text[cut:], ONE, text[:cut], text[cut:]))
            assert reserved_in(model, family, forged) == honest


@every_family
def test_image_tokens_may_have_any_type(family: str) -> None:
    prompts = [model_of(family, kind=kind).prepare(user("a", ONE)) for kind in (CONTROL, NORMAL)]
    assert prompts[0].tokens == prompts[1].tokens and prompts[0].spans == prompts[1].spans


@every_family
def test_a_vocabulary_without_image_tokens_is_refused(family: str) -> None:
    for missing in RESERVED[family]:
        if missing in OPTIONAL or family == "llava":
            continue  # these a model can do without
        rest = [text for text in RESERVED[family] if text != missing]
        with pytest.raises(ModelFileError) as raised:
            PLACEMENTS[family](own_tokenizer(rest))
        assert missing in str(raised.value)


def test_gemma_needs_no_placeholder_token_in_its_embedding() -> None:
    tokenizer = own_tokenizer((gemma3.START, gemma3.END))
    [_, start, rows, *_] = gemma3.gemma3_placeholders(tokenizer).pieces(_prepared("gemma3"))
    assert start == tokenizer.id_of(gemma3.START) == rows.token


def test_llava_needs_no_placeholder_token() -> None:
    model = model_of("llava")
    tokenizer = own_tokenizer((BOS,))
    [rows] = llava.llava_placeholders(tokenizer).pieces(_prepared("llava"))
    assert rows.length == 4 and 0 <= rows.token < tokenizer.vocab_size
    placed = llava.llava_placeholders(model.tokenizer).pieces(_prepared("llava"))
    assert placed[0].token == model.tokenizer.id_of(llava.PLACE)


@pytest.mark.parametrize("source", [TEMPLATE, TEXT_TEMPLATE], ids=["parts", "texts"])
def test_requests_may_write_tokens_that_belong_to_texts_and_replies_show_them(source: str) -> None:
    marks, place = ("<|ref|>", "<|/ref|>"), llava.PLACE
    model = model_of("llava", source=source, special=marks)
    assert model.vision is not None and not model.markup
    run: Any = model.vision.placeholders
    placed = replace(run, texts=replace(run.texts, writable=marks))
    model = replace(model, vision=replace(model.vision, placeholders=placed))
    asked = "".join(marks) + "<x>" + place + BOS
    tokens = list(model.prepare([*user(ONE, asked), Message("assistant", asked)]).tokens)
    ids = {text: model.tokenizer.id_of(text) for text in (*marks, place, BOS)}
    counts = {text: tokens.count(token) for text, token in ids.items()}
    assert counts == dict.fromkeys(marks, 2) | {place: PROCESSORS["llava"].rows, BOS: 0}
    assert model.markup == {ids[text]: text.encode() for text in marks}


def test_tiles_without_a_token_are_written_as_text() -> None:
    model = model_of("idefics3")
    prompt = model.prepare(user(ONE))
    assert prompt.images[0].grid == (2, 3)
    shown = model.tokenizer.decode(prompt.tokens)
    assert [shown.count(f"<row_{row}_col_{column}>") for row, column in ((1, 2), (2, 3))] == [1, 1]
    assert reserved_in(model, "idefics3", prompt).count(idefics3.tile(2, 1)) == 1


@pytest.mark.parametrize(
    ("enclosed", "size", "expected"),
    [
        (False, (20, 20), "<image>4</image>"),
        (True, (20, 20), "<image>4</image>"),
        (
            False,
            (56, 84),
            "<image>4</image><slice>4</slice><slice>4</slice><slice>4</slice>\n"
            "<slice>4</slice><slice>4</slice><slice>4</slice>",
        ),
        (
            True,
            (56, 84),
            "<image>4</image><slice><image>4</image><image>4</image><image>4</image>\n"
            "<image>4</image><image>4</image><image>4</image></slice>",
        ),
    ],
)
def test_slices_of_minicpmv_are_marked_as_its_authors_mark_them(enclosed, size, expected) -> None:
    tokenizer = own_tokenizer(minicpmv.TEXTS.reserved, NORMAL)
    placeholders = minicpmv.MiniCPMVPlaceholders(tokenizer, SLICES, enclosed=enclosed)
    pieces = placeholders.pieces(PROCESSORS["minicpmv"].outline(*size))
    rows = [piece for piece in pieces if isinstance(piece, PlaceholderRows)]
    assert [piece.first_row for piece in rows] == list(range(0, 4 * len(rows), 4))
    shown = (tokenizer.decode([p]) if isinstance(p, int) else p for p in pieces)
    assert "".join(p if isinstance(p, str) else str(p.length) for p in shown) == expected


@pytest.mark.parametrize(
    "content", [("Compare.", ONE), (ONE, "Compare."), ("This:", ONE, "and", TWO), (ONE, TWO)]
)
def test_the_parts_of_a_message_to_minicpmv_are_lines(content) -> None:
    """As the authors' code joins them for templates of texts."""
    model = model_of("minicpmv", source=TEXT_TEMPLATE)
    lines = "\n".join(part if isinstance(part, str) else minicpmv.PLACE for part in content)
    texts = f"<|im_start|>user\n{lines}<|im_end|>\n<|im_start|>assistant\n".split(minicpmv.PLACE)
    images = [part for part in content if isinstance(part, ImagePart)]
    shown = model.vision.prepare(images, at_most=4096).pieces
    expected = lay_out(model.tokenizer, texts, shown)
    assert model.prepare(user(*content)).tokens == expected.tokens


def _prepared(family: str) -> Any:
    return model_of(family).prepare(user(ONE)).images[0]


@every_family
def test_a_text_only_model_refuses_images(family: str) -> None:
    model = model_of(family)
    blind = ChatModel(model.decoder, model.tokenizer, model.template, model.description)
    for ask in (lambda: blind.prepare(user("a", ONE)), lambda: blind.prepare_text("a", (ONE,))):
        with pytest.raises(RequestError, match="model does not support images"):
            ask()
    assert blind.prepare(user("a")).tokens and blind.tower is None


@every_family
def test_images_beyond_the_context_are_not_decoded(family: str) -> None:
    model = model_of(family)
    each = sum(span.length for span in model.prepare(user(ONE)).spans)
    broken = ImagePart(b"no image")
    with pytest.raises(PromptTooLongError, match=r"2 of 3 images take \d+ tokens"):
        model.prepare(user(ONE, ONE, broken), at_most=2 * each - 1)
    with pytest.raises(PromptTooLongError, match="1 of 2 images"):
        model_of(family, context=each - 1).prepare(user(ONE, broken))
    with pytest.raises(RequestError, match="no PNG"):
        model.prepare(user(ONE, broken))


TEXTS_IN_LISTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}|{% endfor %}"
)


def test_a_template_that_reads_texts_from_lists_gets_lists() -> None:
    model = model_of("llava", source=TEXTS_IN_LISTS)
    prompt = model.prepare([*user("a ", ONE, "b"), Message("assistant", "c"), Message("user", "d")])
    assert len(prompt.spans) == 1
    shown = [token for token in prompt.tokens if token != model.tokenizer.id_of(llava.PLACE)]
    assert model.tokenizer.decode(shown) == "a \nb|c|d|"


def test_too_many_images_are_refused_before_decoding() -> None:
    broken = ImagePart(b"no image")
    with pytest.raises(RequestError, match="has 3 images; this model takes at most 2"):
        model_of("mllama", most_images=2).prepare(user(broken, broken, broken))


def test_a_template_that_omits_an_image_is_an_error() -> None:
    first = TEMPLATE.replace("for part in m.content", "for part in m.content[:1]")
    with pytest.raises(RequestError, match="shows 1 of the conversation's 2 images"):
        model_of("gemma3", source=first).prepare(user(ONE, TWO))


@every_family
def test_bos_occurs_once_before_an_image_at_the_start(family: str) -> None:
    model = model_of(family)
    tokenizer = model.tokenizer
    tokenizer.bos_id, tokenizer.add_bos = tokenizer.id_of(BOS), True
    for prompt in (model.prepare_text("", (ONE,)), model.prepare_text(f"{BOS}[img-0]", (ONE,))):
        assert list(prompt.tokens).count(tokenizer.bos_id) == 1
        assert prompt.tokens[0] == tokenizer.bos_id
        assert prompt.spans[0].start > 0


@every_family
def test_tags_place_images_in_a_raw_prompt(family: str) -> None:
    model = model_of(family)
    spelled = model.vision.placeholders.texts.spelled
    one, two, both = (
        [image.digest for image in model.prepare(user(*parts)).images]
        for parts in ((ONE,), (TWO,), (ONE, TWO))
    )
    assert both == one + two
    prompt = model.prepare_text("a [img-1] b [img-0] c", (ONE, TWO))
    assert list(dict.fromkeys(span.digest for span in prompt.spans)) == two + one
    parts = PARTS.replace("IMAGE", spelled.strip())  # line breaks are the writer's part
    chat = model_of(family, source="{% for m in messages %}" + parts + "{% endfor %}")
    assert prompt.tokens == chat.prepare(user("a ", TWO, " b ", ONE, " c")).tokens
    assert model.prepare_text("hi", (ONE,)).tokens == chat.prepare(user(ONE, "hi")).tokens
    assert spelled not in model.tokenizer.decode(prompt.tokens)


PARTS = (
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}"
)


def test_a_tag_without_an_image_is_refused_in_a_raw_prompt() -> None:
    with pytest.raises(RequestError, match="invalid image index: 7"):
        tagged("see [img-7]", (ONE,))
    assert tagged("see [img-7]", ()) == ("see [img-7]",)
    assert model_of("gemma3").prepare_text("see [img-7]").spans == ()


@pytest.mark.parametrize(
    "text, content",
    [
        ("hi", (ONE, TWO, "hi")),
        ("", (ONE, TWO)),
        ("a [img] b", (TWO, "a ", ONE, " b")),
        ("a [img] b [img] c [img]", ("a ", ONE, " b ", TWO, " c [img]")),
        ("a [img-1] b", (ONE, "a ", TWO, " b")),
        ("[img-1][img]", (TWO, ONE)),
        ("see [img-9] [img-99999999999999999999]", (ONE, TWO, "see [img-9] ")),
    ],
)
def test_images_of_a_message_are_placed_first_or_at_tags(text, content) -> None:
    if text.startswith("see"):
        content = (*content[:-1], text)
    assert with_images(text, (ONE, TWO)) == content


def test_without_images_a_message_is_its_text() -> None:
    assert with_images("a [img] [img-0] b", ()) == ("a [img] [img-0] b",)
