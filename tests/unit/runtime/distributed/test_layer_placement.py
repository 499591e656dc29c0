"""Placement of layers on devices: by given shares, or by free memory."""

import pytest
import torch

from runtime.distributed.layer_placement import LayerPlacement, by_room, by_shares, inseparable
from runtime.errors import ConfigurationError


def test_a_layer_is_inseparable_from_the_one_whose_pages_it_uses() -> None:
    assert inseparable([]) == []
    assert inseparable([0, 1, 2]) == [range(1), range(1, 2), range(2, 3)]
    assert inseparable([0, 1, 2, 1, 2, 5]) == [range(1), range(1, 5), range(5, 6)]
    assert inseparable([0, 0, 2, 2, 3, 0]) == [range(6)]


def test_shares_divide_the_layers_in_order() -> None:
    assert by_shares(8, [1, 1]) == [0] * 4 + [1] * 4
    assert by_shares(8, [3, 1]) == [0] * 6 + [1] * 2
    assert by_shares(8, [1, 0, 1]) == [0] * 4 + [2] * 4
    assert by_shares(5, [7]) == [0] * 5


def test_the_first_layers_stay_on_the_host_if_not_all_are_placed_on_devices() -> None:
    assert by_shares(6, [1, 1], most=4) == [None, None, 0, 0, 1, 1]
    assert by_shares(6, [1, 1], most=0) == [None] * 6
    assert by_shares(3, [1, 2], most=99) == [0, 1, 1]


@pytest.mark.parametrize("shares", [[], [0, 0], [1, -1]])
def test_empty_zero_and_negative_shares_are_refused(shares) -> None:
    with pytest.raises(ConfigurationError, match="tensor_split"):
        by_shares(4, shares)


def test_layers_that_fit_on_the_main_device_are_placed_there() -> None:
    assert by_room([10] * 4, [100, 40, 100], main=1) == [1] * 4


def test_other_layers_fill_the_devices_evenly() -> None:
    assert by_room([10] * 6, [30, 59]) == [0] * 2 + [1] * 4  # two thirds of each
    assert by_room([10] * 6, [50, 50], main=1) == [0] * 3 + [1] * 3
    unlike = by_room([30, 10, 10, 10, 10, 20], [40, 55])
    assert unlike == [0, 0, 1, 1, 1, 1]


def test_the_first_layers_stay_on_the_host_if_devices_are_too_small() -> None:
    assert by_room([10] * 6, [25, 15]) == [None] * 3 + [0, 0, 1]
    assert by_room([10] * 6, [9, 9]) == [None] * 6
    assert by_room([10] * 6, [100], most=2) == [None] * 4 + [0] * 2
    assert by_room([10] * 6, [15, 100], most=4, main=0) == [None, None, 1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_devices_are_not_overfilled_and_one_more_layer_would_not_fit(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 50, (12,), generator=draw).tolist()
    room = torch.randint(20, 200, (3,), generator=draw).tolist()
    found = by_room(sizes, room)
    for device, free in enumerate(room):
        assert sum(s for s, d in zip(sizes, found, strict=True) if d == device) <= free
    known = [device for device in found if device is not None]
    assert known == sorted(known) and found == [None] * found.count(None) + known
    if None in found and not known:
        assert sizes[-1] > max(room)


def test_devices_are_listed_once_with_the_main_one_first() -> None:
    host, one, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert LayerPlacement((host, one, one, other), other).all == (other, host, one)
