"""Features of every vision tower against `transformers`, on tiny random models."""

from typing import Any

import pytest
import torch

from runtime.errors import UnsupportedModelError
from tests.families.agreement import Pair, check_long_prompt, load_decoder
from tests.families.tower_families import TOWERS
from tests.families.tower_family import TowerFamily
from tests.families.towers import (
    TOLERANCE,
    TowerPair,
    check_limits,
    encoded,
    load_tower,
    random_pixels,
    worst,
)
from tests.tiny_models import tiny_tokenizer

CASES = [(name, *case) for name, row in TOWERS.items() for case in row.cases]
# All checks have the first flavour of each configuration; that files of others mean the same, one
# image shows.
FIRST = [*{case[:2]: case for case in reversed(CASES)}.values()]
OTHERS = [case for case in CASES if case not in FIRST]
REFUSED = [(name, *case) for name, row in TOWERS.items() for case in row.refused]
TEXT_FILES = [name for name, row in TOWERS.items() if row.text_file]
# Of a row's largest feature in bfloat16, whose numbers have eight bits.
NEAR = 0.1
Made = tuple[TowerFamily, TowerPair]


@pytest.fixture(scope="module", params=FIRST, ids="-".join)
def made(request, tmp_path_factory) -> Made:
    family, config, flavour = request.param
    folder = tmp_path_factory.mktemp("models")
    return TOWERS[family], TOWERS[family].write(folder, config, flavour=flavour)


def test_features_agree(made: Made) -> None:
    family, pair = made
    for shape in family.shapes:
        for images in (1, family.several):
            pixels = family.pixels(pair, images, shape)
            features = encoded(pair.tower, pixels, family.grid(shape))
            difference = worst(features, family.expected(pair, pixels, shape))
            assert difference <= TOLERANCE, (shape, images)


def test_features_do_not_depend_on_the_other_images(made: Made) -> None:
    family, pair = made
    shape = family.shapes[-1]
    pixels, grid = family.pixels(pair, 3, shape), family.grid(shape)
    together = encoded(pair.tower, pixels, grid)
    assert torch.equal(together[1:2], encoded(pair.tower, pixels[1:2], grid))


def test_declared_limits_hold(made: Made) -> None:
    family, pair = made
    for images in family.limit_images:
        check_limits(pair.tower, images)


@pytest.mark.parametrize("made", OTHERS, ids="-".join, indirect=True)
def test_features_of_files_of_other_flavours_agree(made: Made) -> None:
    family, pair = made
    shape = family.shapes[-1]
    pixels = family.pixels(pair, 1, shape)
    features = encoded(pair.tower, pixels, family.grid(shape))
    assert worst(features, family.expected(pair, pixels, shape)) <= TOLERANCE


@pytest.mark.parametrize("family", TOWERS)
def test_features_in_bfloat16_are_near(tmp_path, family: str) -> None:
    row = TOWERS[family]
    pair = row.write(tmp_path, flavour=row.flavours[-1])
    half = load_tower(row.build, pair.path, torch.bfloat16)
    largest = half.limits.largest
    pixels = random_pixels(1, *largest.shape)
    features = encoded(half, pixels, largest.grid)
    assert features.dtype == torch.bfloat16
    assert worst(features, encoded(pair.tower, pixels, largest.grid)) <= NEAR
    check_limits(half, images=max(row.limit_images))


@pytest.mark.parametrize("family", TEXT_FILES)
def test_the_text_model_is_a_file_of_its_own_family(tmp_path, family: str) -> None:
    """The file that belongs to a projector answers as the whole model does."""
    pair = TOWERS[family].write(tmp_path)
    decoder = load_decoder(pair.path.parent / "tiny.gguf")
    check_long_prompt(Pair(decoder, pair.twin, tiny_tokenizer().get_vocab_size()))


@pytest.mark.parametrize(("family", "changes", "flavour", "words"), REFUSED)
def test_settings_that_files_cannot_state_are_refused(
    tmp_path, family: str, changes: dict[str, Any], flavour: str, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        TOWERS[family].write(tmp_path, flavour=flavour, **changes)
