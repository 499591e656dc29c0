"""Logits of Llama 3.2 Vision, the text model, against `transformers`, on tiny random models."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.memory_profile import peak_bytes
from tests.parity.agreement import (
    CHECKS,
    QUANTIZED_TYPES,
    TOLERANCE,
    Pair,
    check_quantized,
    load_decoder,
    random_tokens,
)
from tests.parity.image_rows import (
    OPTIONS,
    TILES,
    Picture,
    logits_of_twin,
    tiny_config,
    write_seeing,
)
from tests.parity.paged_decoder import PagedDecoder
from tests.tiny_models import tiny_tokenizer, write_tiny

CONFIGS = {
    "plain": tiny_config(),
    "cross_layer_last": tiny_config(cross_attention_layers=[0, 4]),
    "every_head_its_own": tiny_config(num_key_value_heads=4),
}
LARGE = tiny_config(hidden_size=256, intermediate_size=256)
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


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory) -> Pair:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    twin = write_seeing(path, CONFIGS[request.param])
    return Pair(load_decoder(path), twin, tiny_tokenizer().get_vocab_size())


@pytest.mark.parametrize("check", CHECKS)
def test_logits_without_images_agree(pair, check) -> None:
    CHECKS[check](pair)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_quantized_copies_agree(tmp_path, type) -> None:
    check_quantized(LARGE, tmp_path, type, **OPTIONS)


def test_a_file_that_sees_no_images_agrees(tmp_path) -> None:
    twin = write_tiny(tmp_path / "blind.gguf", CONFIGS["plain"], **OPTIONS)
    decoder = load_decoder(tmp_path / "blind.gguf")
    assert decoder.cache_layers[1].kind.capacity(100) == 0
    CHECKS["two_chunks"](Pair(decoder, twin, tiny_tokenizer().get_vocab_size()))


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
@pytest.mark.parametrize("cuts", [(), (1, 5, 18), (6, 7), tuple(range(1, LENGTH))])
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
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        pair.decoder.logits(pair.decoder.states(batch, paged.cache))
    assert 0 < peak_bytes(recorded) <= pair.decoder.activation_bytes(LENGTH, 3)
