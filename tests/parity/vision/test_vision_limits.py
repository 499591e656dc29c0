"""The largest images of every vision family: the processor's output, and the memory that it takes.

Files state limits of images in several ways, or not at all. The limits in these tests are numbers
of rows that no rectangle has, tiny numbers, and areas that are not multiples of a patch.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model_zoo.chat_model import ChatModel
from model_zoo.registry import LoadOptions, load
from runtime.errors import DoesNotFitError, ModelFileError, RequestError
from runtime.vision.encoder import ImageOutline, LocalEncoder
from tests.families.engine_runs import answers
from tests.families.vision_agreement import FLAVOURS, VisionPair
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import rewrite
from tests.memory_profile import peak_bytes, recorded_memory
from tests.parity.vision.test_vision_engine import check_answer, request, running

CPU, META = torch.device("cpu"), torch.device("meta")
# Their processors have the limits of other rows.
SAME_LIMITS = ("exaone45", "gemma4_small", "gemma4_unified", "glm_ocr", "llava_cropped", "qwen35")
QWEN_KEYS = {
    ("qwen25vl", "llama.cpp"): ("vision.image_min_pixels", "vision.image_max_pixels"),
    ("qwen25vl", "ollama"): ("vision.min_pixels", "vision.max_pixels"),
    ("qwen3vl", "llama.cpp"): ("vision.image_min_pixels", "vision.image_max_pixels"),
    ("qwen3vl", "ollama"): ("vision.shortest_edge", "vision.longest_edge"),
}
UNITS = {"glm4v": 28, "paddleocr": 28, "qwen25vl": 28, "qwen3vl": 32, "gemma4": 12}
Limits = Mapping[str, Any]


def qwen_limits(family: str, flavour: str) -> Iterator[Limits]:
    """Of a prime number of rows, of less than one; the least and the most alike."""
    (least, most), square = QWEN_KEYS[family, flavour], UNITS[family] ** 2
    if (family, flavour) == ("qwen3vl", "llama.cpp"):  # the start of qwen25vl is tested below
        yield {least: None, most: None}
    yield {least: 100 * square + 1, most: 100 * square + 1}
    if flavour == "ollama":  # whose keys differ, but not what is computed from them
        return
    for area in (1, square - 1, 53 * square, 211 * square, 211 * square + 1, 65_537):
        yield {least: None, most: area}
    for area in (square - 1, 211 * square + 1):
        yield {least: 1, most: area}
    for area in (square, 30 * square):
        yield {least: area, most: area}


def limits_of(family: str, flavour: str) -> Iterator[Limits]:
    if family in ("qwen25vl", "qwen3vl"):
        yield from qwen_limits(family, flavour)
        return
    yield {}
    if flavour != VISION_MODELS[family].flavours[0]:  # the same keys
        return
    if family == "gemma4":
        for area in (1, 7 * 144, 7 * 144 - 1, 11 * 144, 13 * 144 + 100):
            yield {"vision.image_max_pixels": area}
    if family in ("glm4v", "paddleocr"):
        square = UNITS[family] ** 2
        for area in (1, 53 * square, 211 * square + 1):
            yield {"vision.image_min_pixels": None, "vision.image_max_pixels": area}
    if family == "hunyuan_vl":
        for area in (1, 255, 53 * 256, 211 * 256 + 1):
            yield {"vision.image_min_pixels": None, "vision.image_max_pixels": area}
        yield {"vision.image_min_pixels": 30 * 256, "vision.image_max_pixels": 30 * 256}
    if family == "idefics3":
        for edge in (None, 1, 35, 36, 37, 71, 107, 109):
            yield {"vision.preproc_image_size": edge}
    if family == "internvl":
        yield {"vision.preproc_min_tiles": None, "vision.preproc_max_tiles": None}
        for most in (1, 2, 7, 11):
            yield {"vision.preproc_max_tiles": most}
            yield {"vision.preproc_min_tiles": most, "vision.preproc_max_tiles": most}
    if family == "lfm2":
        yield {"vision.do_image_splitting": False, "vision.min_image_tokens": 12}
        yield {"vision.use_thumbnail": False, "vision.max_tiles": 3}
    if family == "llava_next":
        # More lines of features than the canvas with the most tiles has.
        for sides in ([36, 72, 72, 36], [36, 5 * 36, 4 * 36, 36], [36, 36], [3 * 36, 2 * 36]):
            yield {"vision.image_grid_pinpoints": sides}
    if family == "mistral3":
        for edge in (6, 7, 11, 12, 13, 61, 100):
            yield {"vision.image_size": edge}


CASES = [
    (family, flavour, limits)
    for family, row in VISION_MODELS.items()
    if family not in SAME_LIMITS
    for flavour in row.flavours
    for limits in limits_of(family, flavour)
]


class Made:
    """The tiny model of each family and flavour, written when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders: dict[tuple[str, str], Path] = {}

    def load(
        self,
        family: str,
        flavour: str,
        limits: Limits,
        device: torch.device = CPU,
        context_tokens: int | None = None,
    ) -> ChatModel:
        """With a file that states other limits; a key whose value is None is left out."""
        folder = self._folder(family, flavour)
        own = folder / "mmproj-tiny.gguf"
        source = own if own.exists() else folder / "tiny.gguf"
        changed = rewrite(source, folder / f"changed-{source.name}", own_keys=limits)
        loading = LoadOptions(context_tokens=context_tokens)
        options = {"device": device, "dtype": torch.float32, "options": loading}
        if own.exists():
            return load(folder / "tiny.gguf", projector=changed, **options)
        return load(changed, **options)

    def _folder(self, family: str, flavour: str) -> Path:
        if (family, flavour) not in self._folders:
            folder = self._folders[family, flavour] = self._factory.mktemp("models")
            VISION_MODELS[family].write(folder, flavour=flavour)
        return self._folders[family, flavour]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    return Made(tmp_path_factory)


@pytest.fixture(scope="module", params=CASES, ids=str)
def limited(made, request) -> ChatModel:
    return made.load(*request.param)


def sizes(count: int) -> Iterator[tuple[int, int]]:
    """Heights and widths of images: of any area and shape, the longest that are accepted among
    them."""
    draw = np.random.default_rng(3)
    for _ in range(count):
        sides = np.exp(draw.uniform(0, np.log(3000), 2)).astype(int)
        yield int(sides[0]), int(sides[1])
        yield int(sides[0]), int(sides[0]) * int(draw.integers(1, 201))
        yield 200 * int(sides[1]), int(sides[1])


def outlines(model: ChatModel, count: int) -> list[ImageOutline]:
    """What the processor makes of images of many sizes, as far as it accepts them."""
    found = []
    for height, width in sizes(count):
        try:
            found.append(model.vision.processor.outline(height, width))
        except RequestError as error:
            assert "times as long as wide" in str(error)
    return found


def check_limits(model: ChatModel) -> None:
    tower, processor = model.vision.tower, model.vision.processor
    largest = processor.largest
    assert tower.limits.largest == largest
    assert 1 <= largest.rows <= processor.most_rows == tower.limits.rows
    for outline in outlines(model, 100):
        assert 1 <= outline.rows <= tower.limits.rows
        assert outline.elements <= tower.limits.pixel_elements


def test_no_image_exceeds_the_largest_that_a_start_reserves_and_encodes(limited) -> None:
    check_limits(limited)
    encoder = LocalEncoder(limited.tower, device=CPU, weight_bytes=0)
    encoder.warm_up()
    encoder.close()


def test_settings_of_images_are_written_alike_in_every_process(limited) -> None:
    """They are part of the names of features, which processes share; an address would differ."""
    assert " at 0x" not in repr(limited.vision.processor)


def test_images_of_extreme_shapes_take_no_more_memory_than_planned(limited) -> None:
    found = [o for o in outlines(limited, 100) if o.rows <= 300]
    ranks = (lambda o: o.rows), (lambda o: prod(o.shape)), (lambda o: o.grid[1]), (lambda o: o.grid)
    for outline in {str(o): o for o in (max(found, key=rank) for rank in ranks)}.values():
        image = outline.blank()
        with torch.inference_mode():
            encode = partial(limited.tower.encode, image.pixels[None], image.grid)
            encode()
            with recorded_memory() as recorded:
                features = encode()
        assert features.shape == (1, outline.rows, limited.tower.limits.width)
        assert 0 < peak_bytes(recorded) <= limited.tower.activation_bytes(1)


@pytest.mark.parametrize("family", ["qwen25vl", "qwen3vl"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_limits_that_are_absent_or_huge_are_planned_for_without_encoding(
    made, family, flavour
) -> None:
    least, most = QWEN_KEYS[family, flavour]
    check_limits(made.load(family, flavour, {least: None, most: None}, META))
    model = made.load(family, flavour, {most: 16 << 20}, META)
    assert model.vision.processor.most_rows == (16 << 20) // UNITS[family] ** 2
    check_limits(model)


@pytest.mark.parametrize(
    ("family", "flavour", "context"),
    [
        ("deepseekocr", "llama.cpp", 96),
        ("dots_ocr", "llama.cpp", 16),
        ("glm4v", "llama.cpp", 16),
        ("hunyuan_vl", "llama.cpp", 16),
        ("idefics3", "llama.cpp", 16),
        ("internvl", "llama.cpp", 16),
        ("kimivl", "llama.cpp", 16),
        ("lfm2", "llama.cpp", 16),
        ("llama4", "ollama", 16),
        ("llava_next", "llama.cpp", 64),
        ("minicpmv", "llama.cpp", 16),
        ("minimax_m3", "llama.cpp", 16),
        ("mistral3", "ollama", 16),
        ("muse_glimmer", "llama.cpp", 16),
        ("paddleocr", "llama.cpp", 16),
        ("qwen25vl", "ollama", 16),
        ("qwen3vl", "ollama", 16),
        ("step3vl", "llama.cpp", 96),
    ],
)
def test_images_are_scaled_down_to_the_context_that_is_served(
    made, family, flavour, context
) -> None:
    """Also if the text model supports less than is requested."""
    large = made.load(family, flavour, {}, META)
    photo = large.vision.processor.outline(300, 400).rows
    small = made.load(family, flavour, {}, META, context_tokens=context).vision
    assert small.processor.outline(300, 400).rows <= context - context // 4 < photo
    assert small.tower.limits.rows == small.processor.most_rows < large.tower.limits.rows
    most = large.decoder.context_length
    assert (
        made.load(family, flavour, {}, META, 2 * most).vision.processor
        == made.load(family, flavour, {}, META, most).vision.processor
    )


@pytest.mark.parametrize(
    ("family", "context"),
    [
        ("deepseekocr", 96),
        ("idefics3", 16),
        ("internvl", 16),
        ("lfm2", 32),
        ("llava_next", 64),
        ("minicpmv", 16),
        ("step3vl", 96),
    ],
)
def test_an_encoder_for_a_longer_context_encodes_images_of_a_shorter_one(
    made, family, context
) -> None:
    """As in a pool that models with several contexts share."""
    flavour = VISION_MODELS[family].flavours[0]
    small = made.load(family, flavour, {}, context_tokens=context)
    large = made.load(family, flavour, {})
    outline = small.vision.processor.outline(300, 400)
    assert outline.rows < large.vision.processor.outline(300, 400).rows
    pixels = torch.rand(1, *outline.shape)
    with torch.inference_mode():
        own, pooled = (each.tower.encode(pixels, outline.grid) for each in (small, large))
    assert own.shape[1] == outline.rows and torch.equal(own, pooled)
    pieces = [list(each.vision.placeholders.pieces(outline)) for each in (small, large)]
    assert pieces[0] == pieces[1]


def test_a_start_on_a_cpu_encodes_a_small_image_whatever_the_file_allows(made) -> None:
    _, most = QWEN_KEYS["qwen3vl", "ollama"]
    model = made.load("qwen3vl", "ollama", {most: 16 << 20})
    first = model.vision.first_image(CPU, 1 << 20)
    assert first.rows <= 64 < model.tower.limits.largest.rows
    encoder = LocalEncoder(model.tower, device=CPU, weight_bytes=0, first=first)
    encoder.warm_up()
    encoder.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_limits_that_exceed_the_memory_are_refused_before_anything_is_encoded(
    made, flavour
) -> None:
    _, most = QWEN_KEYS["qwen25vl", flavour]
    model = made.load("qwen25vl", flavour, {most: 1 << 24})
    pair = VisionPair(model, None, VISION_MODELS["qwen25vl"].expected)
    with pytest.raises(DoesNotFitError), running(pair, memory_bytes=1 << 28):
        pass


@pytest.mark.parametrize("family", ["qwen25vl", "qwen3vl"])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_default_gives_way_to_the_bound_that_the_file_states(made, family, flavour) -> None:
    least, most = QWEN_KEYS[family, flavour]
    small = made.load(family, flavour, {least: None, most: 900}, META).vision.processor
    assert (small.min_pixels, small.max_pixels) == (900, 900)
    large = made.load(family, flavour, {least: 3 << 20, most: None}, META).vision.processor
    assert (large.min_pixels, large.max_pixels) == (3 << 20, 3 << 20)
    with pytest.raises(ModelFileError, match=f"{least}` is 901, more than `.*{most}`, 900"):
        made.load(family, flavour, {least: 901, most: 900}, META)


def test_qwen25vl_starts_and_answers_where_its_file_states_no_limits(tmp_path) -> None:
    """As files of both converters are: the checkpoint's processor has settings, the file has none.

    The largest image is then of 14 x 191 rows, which fill 2 << 20 pixels best.
    """
    pair = VISION_MODELS["qwen25vl"].write(tmp_path, processor={})
    assert pair.model.tower.limits.largest.grid == (14, 191)
    name = "images in two turns"
    with running(pair) as engine:
        [delta] = answers(engine, [request(pair, name)], together=True)
    check_answer(pair, name, delta)


def test_files_of_glm_ocr_have_the_areas_of_their_checkpoint(made) -> None:
    """Those of Ollama are areas of both frames of a patch, as the checkpoint states them."""
    found = [made.load("glm_ocr", flavour, {}, META).vision.processor for flavour in FLAVOURS]
    assert found[0] == found[1]
    assert (found[0].min_pixels, found[0].max_pixels) == (2 * 28 * 28, 30 * 28 * 28)


IMPOSSIBLE = [
    ("llava", "llama.cpp", "vision.image_mean", [0.5, -1.0, 0.5]),
    ("llava", "llama.cpp", "vision.image_mean", [0.5, 3.7, 0.5]),
    ("mllama", "ollama", "attention.key_length", 17),
]


@pytest.mark.parametrize(("family", "flavour", "key", "value"), IMPOSSIBLE, ids=str)
def test_values_with_which_no_image_can_be_computed_are_refused_by_key(
    made, family, flavour, key, value
) -> None:
    with pytest.raises(ModelFileError, match=re.escape(f".{key}` is ")):
        made.load(family, flavour, {key: value})
