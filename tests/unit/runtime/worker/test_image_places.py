"""Axes and seen indices of rows before, in and behind images."""

import numpy as np
import pytest
import torch

from runtime.engine.request import ImageSpan
from runtime.kv.cache_kinds import Cross, Full
from runtime.vision.image_rows import axes_of
from tests.unit.runtime.worker.test_input_preparation import (
    KINDS,
    PICTURES,
    check_places,
    chunk,
    inputs_of,
    plan,
    preparer_of,
)


def test_rows_behind_all_images_are_decoded_like_those_of_a_text() -> None:
    preparer = preparer_of(KINDS, position_axes=3)
    pictured, text = chunk(0, 13, 1, spans=PICTURES), chunk(1, 40, 1)
    preparer.prepare(plan(pictured._replace(start=12), text))  # a row of an image
    assert preparer._steps[0].decode is None
    preparer.prepare(plan(pictured, text))
    first = preparer._steps[0].decode
    assert first is not None
    for start in (14, 15):
        chunks = [pictured._replace(start=start), text._replace(start=start + 27)]
        check_places(inputs_of(preparer, plan(*chunks)), chunks)
        assert preparer._steps[0].decode is first


def test_rows_that_see_image_rows_are_never_those_of_a_text() -> None:
    preparer = preparer_of((Full(), Cross(2, 40, alignment=4)))
    pictured = chunk(0, 20, 1, spans=(ImageSpan(2, 1, False, b"a", 3),))
    for start in (20, 21):
        inputs = inputs_of(preparer, plan(pictured._replace(start=start)))
        assert (inputs.groups[1].begin.tolist(), inputs.groups[1].end.tolist()) == ([0], [3])


def test_a_sequence_whose_context_has_shifted_has_the_places_of_its_remaining_images() -> None:
    preparer = preparer_of(KINDS, position_axes=3)
    shifted = chunk(0, 20, 1, spans=PICTURES)
    preparer.prepare(plan(shifted))
    shifted.sequence._set_spans(PICTURES[:1])
    shifted = shifted._replace(start=16, epoch=1)
    check_places(inputs_of(preparer, plan(shifted)), [shifted])


def test_axes_are_prepared_for_models_that_need_them():
    preparer = preparer_of((Full(),), position_axes=3)
    image = ImageSpan(2, 6, False, b"a", grid=(2, 3))
    inputs = inputs_of(preparer, plan(chunk(0, 1, 9, spans=(image,)), chunk(1, 20, 1)))
    assert inputs.axes is not None and inputs.axes.dtype == torch.int64
    assert inputs.axes.tolist() == [
        [1, 2, 2, 2, 2, 2, 2, 5, 6, 20],
        [1, 2, 2, 2, 3, 3, 3, 5, 6, 20],
        [1, 2, 3, 4, 2, 3, 4, 5, 6, 20],
    ]
    assert inputs.positions.tolist() == [*range(1, 10), 20]


def test_axes_of_images_count_from_the_first_image():
    preparer = preparer_of((Full(),), position_axes=4)
    images = (
        ImageSpan(1, 6, False, b"a", grid=(2, 3)),
        ImageSpan(8, 2, False, b"b"),
        ImageSpan(10, 2, False, b"c", grid=(1, 2)),
    )
    inputs = inputs_of(preparer, plan(chunk(0, 3, 10, spans=images)))
    assert inputs.axes is not None
    assert inputs.axes.tolist() == [
        [3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
        [2, 0, 1, 2, 7, 8, 9, 0, 1, 12],
        [0, 1, 1, 1, 7, 8, 9, 0, 0, 12],
        [0, 0, 0, 0, 7, 8, 9, 1, 1, 12],
    ]


@pytest.mark.parametrize("cut", range(1, 30))
def test_axes_do_not_depend_on_how_a_prompt_is_divided(cut):
    images = (
        ImageSpan(0, 6, False, b"a", grid=(3, 2)),
        ImageSpan(6, 4, False, b"b", grid=(1, 4)),
        ImageSpan(15, 9, False, b"c", grid=(3, 3)),
        ImageSpan(26, 2, True, b"d"),
    )
    for axes, last in ((3, 29 - 3 - 0 - 6), (4, 29)):
        whole = axes_of(images, 0, 30, axes)
        parts = [axes_of(images, 0, cut, axes), axes_of(images, cut, 30, axes)]
        assert np.array_equal(whole, np.concatenate(parts, axis=1))
        assert whole[:, 29].tolist() == [last] * axes
