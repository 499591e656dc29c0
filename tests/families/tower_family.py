"""A row of the table of vision towers, and the tiny towers that are made from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tests.families.towers import FLAVOURS, Build, TowerPair, make_tower
from tests.tiny_models import Save, save_pretrained


@dataclass(frozen=True)
class TowerFamily:
    """A vision tower: configurations, inputs, and the same features in `transformers`.

    make: a configuration from settings. configs: by name, the settings of each.
    shapes: what `pixels` makes images of: grids, sizes, numbers of tiles; None for a single shape.
    pixels: random input of so many images of a shape.
    expected: features of `transformers` for the pixels of a shape.
    grids: whether the tower takes shapes as its grids, else grids are (1, 1).
    flavours: of the files; `only` has those of single configurations. maker, save: as of
    `write_tiny`.
    writer: writes and loads a tower that `transformers` does not have, with the settings of a
    configuration, instead of `make`'s.
    refused: settings, a flavour whose files cannot state them, and words of the error.
    """

    build: Build
    make: Callable[..., PreTrainedConfig]
    configs: Mapping[str, Mapping[str, Any]]
    pixels: Callable[[TowerPair, int, Any], Tensor]
    expected: Callable[[TowerPair, Tensor, Any], Tensor]
    shapes: Sequence[Any] = (None,)
    several: int = 2
    grids: bool = False
    flavours: Sequence[str] = FLAVOURS
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    limit_images: Sequence[int] = (2,)
    text_file: bool = False
    maker: Any = None
    save: Save = save_pretrained
    writer: Callable[..., TowerPair] | None = None
    refused: Sequence[tuple[Mapping[str, Any], str, str]] = ()

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Configurations with flavours."""
        return [(c, f) for c in self.configs for f in self.only.get(c, self.flavours)]

    def grid(self, shape: Any) -> tuple[int, int]:
        return shape if self.grids else (1, 1)

    def write(
        self,
        folder: Path,
        config: str = "plain",
        *,
        flavour: str = "",
        type: str = "f32",
        **changes,
    ) -> TowerPair:
        """Write the tiny model and load its tower; `flavour`: the first of the family if empty."""
        if self.writer is not None:
            return self.writer(folder, **(self.configs[config] | changes))
        return make_tower(
            self.build,
            self.make(**(self.configs[config] | changes)),
            folder,
            flavour=flavour or self.flavours[0],
            type=type,
            maker=self.maker,
            save=self.save,
        )
