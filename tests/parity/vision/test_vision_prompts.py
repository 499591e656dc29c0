"""Prompts with pictures have the tokens that each family's processor in `transformers` gives."""

import numpy as np
import pytest
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from tests.parity.vision.placeholder_families import (
    CONVERSATIONS,
    FAMILIES,
    Family,
    expected,
    model_of,
    places,
)
from tests.vision_prompts import TEXT_TEMPLATE


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_tokens_and_placeholders_are_those_of_transformers(
    family: Family, conversation: str
) -> None:
    model = model_of(family)
    prompt = model.prepare(CONVERSATIONS[conversation])
    ids, _ = expected(family, CONVERSATIONS[conversation])
    place = model.tokenizer.id_of(family.place)
    assert list(prompt.tokens) == ids
    assert places(prompt) == [index for index, token in enumerate(ids) if token == place]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_a_template_without_image_support_gives_the_same_prompt(
    family: Family, conversation: str
) -> None:
    prompt = model_of(family, TEXT_TEMPLATE).prepare(CONVERSATIONS[conversation])
    assert prompt.tokens == model_of(family).prepare(CONVERSATIONS[conversation]).tokens


def test_every_row_of_features_has_one_placeholder_in_order(family: Family) -> None:
    if family is FAMILIES["mllama"]:
        pytest.skip("its placeholders do not stand for rows")
    prompt = model_of(family).prepare(CONVERSATIONS["images in two turns"])
    for image in prompt.images:
        spans = [span for span in prompt.spans if span.digest == image.digest]
        rows = [span.first_row + row for span in spans for row in range(span.length)]
        assert rows == list(range(image.rows))
    starts = [span.start for span in prompt.spans]
    assert starts == sorted(starts)


def test_only_gemma_attends_within_an_image_in_both_directions() -> None:
    for name, family in FAMILIES.items():
        spans = model_of(family).prepare(CONVERSATIONS["two images in one message"]).spans
        assert {span.whole for span in spans} == {name.startswith("gemma")}


def test_a_repeated_image_is_encoded_once(family: Family) -> None:
    prompt = model_of(family).prepare(CONVERSATIONS["the same image twice"])
    assert len(prompt.images) == 1
    assert {span.digest for span in prompt.spans} == {prompt.images[0].digest}
    both = model_of(family).prepare(CONVERSATIONS["two images in one message"])
    assert len(both.images) == 2


@pytest.mark.parametrize("name", ["glm4v", "qwen25vl", "qwen3vl"])
def test_placeholders_with_positions_on_axes_have_the_grid_of_the_image(name: str) -> None:
    family = FAMILIES[name]
    _, made = expected(family, CONVERSATIONS["two images in one message"])
    spans = model_of(family).prepare(CONVERSATIONS["two images in one message"]).spans
    merged = [(rows // 2, columns // 2) for _, rows, columns in np.asarray(made["image_grid_thw"])]
    assert [span.grid for span in spans] == merged


@pytest.mark.parametrize("conversation", [name for name in CONVERSATIONS if name != "text alone"])
def test_cross_attention_rows_are_those_of_the_processors_mask(conversation: str) -> None:
    """The tiles of each image, and none of their padding."""
    family = FAMILIES["mllama"]
    prompt = model_of(family).prepare(CONVERSATIONS[conversation])
    ids, made = expected(family, CONVERSATIONS[conversation])
    mask = np.asarray(made["cross_attention_mask"])[0]  # [tokens, images, tiles]
    tiles = mask.max(0).sum(-1)
    assert [span.cross_rows for span in prompt.spans] == [17 * count for count in tiles]
    assert [span.cross_padding for span in prompt.spans] == [17 * (4 - n) for n in tiles]
    first = get_cross_attention_token_mask(ids, ids[prompt.spans[0].start])
    assert [begin for begin, _ in first] == [span.start for span in prompt.spans]
