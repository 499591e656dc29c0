"""Logits of Llama 3.2 Vision's text model with images, on tiny random models."""

import pytest
import torch
from torch import Tensor

from tests.families.agreement import (
    TOLERANCE,
    Pair,
    random_tokens,
)
from tests.families.image_rows import (
    TILES,
    Picture,
    logits_of_twin,
)
from tests.families.paged_decoder import PagedDecoder
from tests.families.text_families import TEXT_MODELS
from tests.memory_profile import peak_bytes, recorded_memory

MLLAMA = TEXT_MODELS["mllama"]
LENGTH = 40
# How images may lie in a text of that length: their positions and tiles.
SCENES = {
    "at_the_start": [(0, TILES)],
    "padded_at_the_start": [(0, 1)],
    "behind_text": [(6, TILES)],
    "padded_behind_text": [(6, 1)],
    "a_run_of_two": [(4, 2), (5, 3)],
    "apart": [(0, 2), (17, 1)],
    "apart_behind_text": [(3, 1), (4, 2), (17, 1), (30, 2)],
    "last_of_all": [(39, 2)],
}
CUTS = [(1, 5, 18), (), (6, 7), tuple(range(1, LENGTH))]
# How a text is cut matters to the caches, which are alike in all configurations.
FIRST, *OTHERS = MLLAMA.configs
CASES = [*((FIRST, cuts) for cuts in CUTS), *((config, CUTS[0]) for config in OTHERS)]


@pytest.fixture(scope="module", params=MLLAMA.configs)
def pair(request, tmp_path_factory) -> Pair:
    return MLLAMA.pair(tmp_path_factory.mktemp("models") / "tiny.gguf", request.param)


@pytest.fixture(scope="module")
def scenes(pair) -> dict[str, tuple[list[int], list[Picture], Tensor]]:
    """Per scene: tokens, pictures, expected log-probabilities."""
    return {name: scene(pair, name) for name in SCENES}


def scene(pair: Pair, name: str) -> tuple[list[int], list[Picture], Tensor]:
    pictures = [Picture(at, tiles, bytes([len(name), at])) for at, tiles in SCENES[name]]
    tokens = random_tokens(LENGTH, seed=len(name))
    for picture in pictures:
        tokens[picture.position] = pair.twin.config.vocab_size
    logits = logits_of_twin(pair.twin, tokens, pictures)
    return tokens, pictures, logits[:, : pair.known].log_softmax(-1)


def show(paged: PagedDecoder, slot: int, pictures: list[Picture]) -> None:
    paged.show(slot, [(picture.span, picture.features) for picture in pictures])


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("pair", "cuts"), CASES, indirect=["pair"])
def test_logits_with_images_agree_however_the_text_is_cut(pair, scenes, name, cuts) -> None:
    tokens, pictures, expected = scenes[name]
    paged = PagedDecoder(pair.decoder)
    show(paged, 0, pictures)
    parts = zip((0, *cuts), (*cuts, LENGTH), strict=True)
    logits = torch.cat([paged.feed({0: tokens[begin:end]}) for begin, end in parts])
    assert pair.worst(logits, expected) <= TOLERANCE


def test_sequences_with_and_without_images_share_a_batch(pair, scenes) -> None:
    paged = PagedDecoder(pair.decoder, slots=3)
    one, two = scenes["apart_behind_text"], scenes["a_run_of_two"]
    text = random_tokens(LENGTH, seed=9)
    show(paged, 2, one[1])
    show(paged, 0, two[1])
    paged.feed({0: two[0][:5]}, outputs=[])
    logits = paged.feed({2: one[0], 1: text, 0: two[0][5:]})
    expected = torch.cat([one[2], pair.expected(text), two[2][5:]])
    assert pair.worst(logits, expected) <= TOLERANCE


def test_images_change_the_logits_of_the_text_behind_them(pair, scenes) -> None:
    tokens, pictures, expected = scenes["apart"]
    paged = PagedDecoder(pair.decoder)
    show(paged, 0, pictures[:1])
    difference = paged.feed({0: tokens}).log_softmax(-1)[:, : pair.known] - expected
    assert difference[:17].abs().max() <= TOLERANCE < 0.1 < difference[17:].abs().max()


@pytest.mark.parametrize("name", SCENES)
def test_a_step_with_images_allocates_no_more_than_it_declares(pair, scenes, name) -> None:
    tokens, pictures, _ = scenes[name]
    paged = PagedDecoder(pair.decoder)
    show(paged, 0, pictures)
    batch = paged.batch({0: tokens}, outputs=range(3))
    pair.decoder.logits(pair.decoder.states(batch, paged.cache))
    with recorded_memory() as recorded:
        pair.decoder.logits(pair.decoder.states(batch, paged.cache))
    assert 0 < peak_bytes(recorded) <= pair.decoder.activation_bytes(LENGTH, 3)
