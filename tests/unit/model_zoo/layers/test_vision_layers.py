"""The parts of vision towers: the order of patches, windows, attention spans, merging."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.vision_utils import get_vision_nearest_position_ids

from model_zoo.layers.vision import image_attention
from model_zoo.layers.vision.image_attention import AttentionSpan, attend, slabs, whole
from model_zoo.layers.vision.merging import merged_planes, shuffled_planes
from model_zoo.layers.vision.patches import squares
from model_zoo.layers.vision.rectangular_vit import nearest_cells
from model_zoo.layers.vision.rotary import coordinates
from model_zoo.layers.vision.windows import windows

CPU = torch.device("cpu")


def heads(images: int, rows: int, *, seed: int) -> Tensor:
    """[images, rows, 2 heads, 4]."""
    return torch.randn(images, rows, 2, 4, generator=torch.Generator().manual_seed(seed))


def masked(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """visible [rows, rows]: whom each row sees."""
    parts = (x.transpose(1, 2) for x in (queries, keys, values))
    return F.scaled_dot_product_attention(*parts, attn_mask=visible).transpose(1, 2)


def test_patches_go_line_by_line() -> None:
    rows, columns, side = 4, 6, 2
    numbers = torch.arange(rows * columns).view(1, 1, rows, columns)
    pixels = numbers.repeat_interleave(side, 2).repeat_interleave(side, 3).expand(1, 3, -1, -1)
    assert squares(pixels, side)[0, :, 0].tolist() == list(range(rows * columns))


def test_coordinates_go_block_by_block() -> None:
    down, right = coordinates(4, 6, block=2, device=CPU)
    assert (6 * down + right)[:8].tolist() == [0, 1, 6, 7, 2, 3, 8, 9]
    assert (6 * down + right)[-4:].tolist() == [16, 17, 22, 23]


def test_a_patch_is_channel_then_row_then_column() -> None:
    pixels = torch.arange(3 * 4 * 6).view(1, 3, 4, 6)
    patch = squares(pixels, 2)[0, 4].view(3, 2, 2)
    assert torch.equal(patch, pixels[0, :, 2:4, 2:4])


@pytest.mark.parametrize("rows, columns", [(6, 6), (7, 5), (2, 9), (1, 1), (3, 3)])
def test_a_row_attends_to_the_rows_of_its_window(rows: int, columns: int) -> None:
    arrangement = windows(rows, columns, 3, device=CPU)
    numbers = torch.arange(rows * columns)
    down, right = numbers // columns // 3, numbers % columns // 3
    visible = (down[:, None] == down) & (right[:, None] == right)
    queries, keys, values = (heads(2, rows * columns, seed=seed) for seed in range(3))
    arranged = (arrangement.arranged(x) for x in (queries, keys, values))
    seen = arrangement.restored(attend(*arranged, arrangement.spans))
    expected = masked(queries, keys, values, visible)
    assert torch.allclose(seen, expected, atol=1e-6)


def test_windows_of_one_shape_are_computed_together() -> None:
    arrangement = windows(7, 8, 3, device=CPU)
    sizes = [(span.end - span.begin) // span.parts for span in arrangement.spans]
    assert sizes == [9, 6, 3, 2]
    assert [span.parts for span in arrangement.spans] == [4, 2, 2, 1]


def test_a_span_may_attend_to_other_rows_than_its_own() -> None:
    queries, keys, values = (heads(2, 9, seed=seed) for seed in range(3))
    spans = (AttentionSpan(0, 6, 0, 9), AttentionSpan(6, 9, 0, 6))
    visible = torch.ones(9, 9, dtype=torch.bool)
    visible[6:, 6:] = False
    seen = attend(queries, keys, values, spans)
    assert torch.allclose(seen, masked(queries, keys, values, visible), atol=1e-6)


def test_queries_are_computed_a_few_at_a_time_with_a_pause_before_each(monkeypatch) -> None:
    queries, keys, values = (heads(2, 50, seed=seed) for seed in range(3))
    expected = attend(queries, keys, values, whole(50))
    scores = 2 * queries.shape[2] * 50
    monkeypatch.setattr(image_attention, "SCORES_AT_ONCE", 7 * scores)
    paused: list[None] = []
    seen = attend(queries, keys, values, whole(50), lambda: paused.append(None))
    assert len(paused) == 8
    torch.testing.assert_close(seen, expected)


def test_slabs_cover_all_rows_once() -> None:
    rows = 2 * image_attention.CPU_SLAB_ROWS + 5
    covered = [row for slab in slabs(torch.empty(rows, 1)) for row in range(slab.start, slab.stop)]
    assert covered == list(range(rows))


@pytest.mark.parametrize("rows, columns", [(4, 6), (5, 7)])
def test_merged_planes_are_what_torch_unfolds(rows: int, columns: int) -> None:
    x = torch.randn(2, rows * columns, 3)
    plane = x.transpose(1, 2).unflatten(2, (rows, columns))
    expected = F.unfold(plane, kernel_size=2, stride=2).transpose(1, 2)
    assert torch.equal(merged_planes(x, rows, columns, 2), expected)


def test_shuffled_planes_hold_the_rows_of_a_square_line_by_line() -> None:
    x = torch.arange(16).view(1, 16, 1)
    assert shuffled_planes(x, 4, 2)[0].tolist() == [
        [0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15],
    ]  # fmt: skip


@pytest.mark.parametrize("across", [1, 10, 32, 70])
def test_patches_of_any_rectangle_have_the_nearest_positions(across: int) -> None:
    for rows in range(1, 200, 3):
        columns = 201 - rows
        theirs = get_vision_nearest_position_ids(torch.tensor([[rows, columns]]), across)
        assert torch.equal(nearest_cells(rows, columns, across, device=CPU), theirs)
