"""Prompts with pictures, token by token as each family's processor in `transformers` makes them."""

import numpy as np
import pytest
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from tests.parity.seeing_families import FAMILIES, TALKS, Family, expected, model_of, places
from tests.vision_prompts import TEXT_TEMPLATE


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("about", TALKS)
def test_tokens_and_places_are_those_of_transformers(family: Family, about: str) -> None:
    model = model_of(family)
    prompt = model.prepare(TALKS[about])
    ids, _ = expected(family, TALKS[about])
    place = model.tokenizer.id_of(family.place)
    assert list(prompt.tokens) == ids
    assert places(prompt) == [index for index, token in enumerate(ids) if token == place]


@pytest.mark.parametrize("about", TALKS)
def test_a_template_that_knows_of_no_images_is_shown_them_all_the_same(
    family: Family, about: str
) -> None:
    prompt = model_of(family, TEXT_TEMPLATE).prepare(TALKS[about])
    assert prompt.tokens == model_of(family).prepare(TALKS[about]).tokens


def test_every_row_of_features_has_one_place_in_order(family: Family) -> None:
    if family is FAMILIES["mllama"]:
        pytest.skip("its places are not for rows")
    prompt = model_of(family).prepare(TALKS["images in two turns"])
    for image in prompt.images:
        spans = [span for span in prompt.spans if span.digest == image.digest]
        rows = [span.first_row + row for span in spans for row in range(span.length)]
        assert rows == list(range(image.rows))
    starts = [span.start for span in prompt.spans]
    assert starts == sorted(starts)


def test_only_gemma_sees_an_image_in_both_directions() -> None:
    for name, family in FAMILIES.items():
        spans = model_of(family).prepare(TALKS["two images in one message"]).spans
        assert {span.whole for span in spans} == {name.startswith("gemma")}


def test_an_image_that_comes_again_is_computed_once(family: Family) -> None:
    prompt = model_of(family).prepare(TALKS["the same image twice"])
    assert len(prompt.images) == 1
    assert {span.digest for span in prompt.spans} == {prompt.images[0].digest}
    both = model_of(family).prepare(TALKS["two images in one message"])
    assert len(both.images) == 2


@pytest.mark.parametrize("name", ["qwen25vl", "qwen3vl"])
def test_qwen_places_are_the_rectangle_of_the_image(name: str) -> None:
    family = FAMILIES[name]
    _, made = expected(family, TALKS["two images in one message"])
    spans = model_of(family).prepare(TALKS["two images in one message"]).spans
    merged = [(rows // 2, columns // 2) for _, rows, columns in np.asarray(made["image_grid_thw"])]
    assert [span.grid for span in spans] == merged


@pytest.mark.parametrize("about", [about for about in TALKS if about != "text alone"])
def test_text_sees_from_the_side_what_the_processor_lets_it_see(about: str) -> None:
    """The tiles of each image, and none of their padding."""
    family = FAMILIES["mllama"]
    prompt = model_of(family).prepare(TALKS[about])
    ids, made = expected(family, TALKS[about])
    mask = np.asarray(made["cross_attention_mask"])[0]  # [tokens, images, tiles]
    tiles = mask.max(0).sum(-1)
    assert [span.cross_rows for span in prompt.spans] == [17 * count for count in tiles]
    assert [span.cross_padding for span in prompt.spans] == [17 * (4 - n) for n in tiles]
    first = get_cross_attention_token_mask(ids, ids[prompt.spans[0].start])
    assert [begin for begin, _ in first] == [span.start for span in prompt.spans]
