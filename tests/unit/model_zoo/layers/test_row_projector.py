"""Projectors work in slabs, with a pause before each."""

import pytest
import torch
import torch.nn.functional as F

from model_zoo.layers.norm import LayerNorm
from model_zoo.layers.vision.image_attention import CPU_SLAB_ROWS
from model_zoo.layers.vision.row_projector import RowProjector

HIDDEN, EACH, BETWEEN, WIDTH = 8, 4, 12, 6
WIDE = HIDDEN * EACH


@pytest.mark.parametrize("late", [False, True])
def test_rows_of_several_slabs_are_projected_with_a_pause_before_each(late: bool) -> None:
    torch.manual_seed(5)
    first, second = torch.randn(BETWEEN, WIDE), torch.randn(WIDTH, BETWEEN)
    normed = WIDE if late else HIDDEN
    scale, bias = torch.randn(normed), torch.randn(normed)
    sizes: list[int] = []

    def up(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x @ first.t()

    projector = RowProjector(
        up,
        lambda x: x @ second.t(),
        (WIDE, BETWEEN, WIDTH),
        LayerNorm(scale, bias, 1e-5),
        late=late,
    )
    count = 2 * CPU_SLAB_ROWS + 3
    x, pauses = torch.randn(count * EACH, HIDDEN), []
    found = projector(x, lambda: pauses.append(len(sizes)))
    joined = x.view(count, -1) if late else x
    expected = F.layer_norm(joined, (normed,), scale, bias, 1e-5).view(count, WIDE)
    expected = F.gelu(expected @ first.t()) @ second.t()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert sizes == [CPU_SLAB_ROWS, CPU_SLAB_ROWS, 3] and pauses == [0, 1, 2]
