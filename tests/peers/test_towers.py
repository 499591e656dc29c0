"""Converted projectors in llama.cpp: it loads them and computes what our towers compute."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_zoo.gguf.metadata import Metadata
from model_zoo.gguf.reader import GGUFFile
from model_zoo.images.normalise import CLIP, STANDARD, UNCHANGED, Normalisation
from model_zoo.images.prepared import prepare
from model_zoo.models.hunyuan.image_processor import HunyuanProcessor
from model_zoo.models.lfm2.multimodal import read_processor
from model_zoo.models.lfm2.vision import Lfm2Tower
from model_zoo.models.mistral3.vision import PROJECTOR_EPS
from model_zoo.multimodal.bounded_processor import BoundedProcessor
from model_zoo.multimodal.placeholders import PlaceholderRows
from tests.families.tower_families import TOWERS
from tests.families.tower_family import TowerFamily
from tests.families.towers import TowerPair, encoded, load_tower, worst
from tests.families.vision_families import VISION_MODELS
from tests.gguf_files import matrices, rewrite
from tests.peers.llama_cpp_vision import their_features, their_layout
from tests.tiny_models import TinyLlama, write_tiny_llama

# It keeps keys, values and its table of GELU in half precision.
NEAR = 5e-3
# Whose convolution of rows has half precision, too.
NEAR_OF_FAMILY = {"glm4v": 1e-2, "glm_ocr": 1e-2}
SLICED = 2 * 56, 3 * 56  # without resizing, six slices of MiniCPM-V
LARGER_SLICED = 2 * 64, 3 * 64  # of the tiny MiniCPM-V 4.6
Compared = tuple[Tensor, list[Tensor]]


def picture(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)


def deepseekocr(folder: Path) -> Compared:
    """The whole image: llama.cpp takes 1,024 pixels, which Pillow's and its own filter reach alike
    from a side of as many. It ends a line of tiles and the whole image as we do."""
    vision, image = deepseekocr_tower(folder, clip={"image_size": 224}), picture(1024, 512)
    prepared = prepare(image, vision.tower.images, tower=b"")
    ours = encoded(vision.tower, prepared.pixels[None], prepared.grid)[0]
    _, _, whole = their_features(folder / "tiny.gguf", vision.path, image, width=64)
    return ours[-len(whole) :], [whole]


def deepseekocr_tiles(folder: Path) -> Compared:
    """llama.cpp stretches both tables of positions otherwise than the authors' code, so one has the
    size of tiles, and all places of the other are equal."""
    vision = deepseekocr_tower(folder, clip={"image_size": 140})
    ours, (tiles, whole) = of_equal_places("deepseekocr", vision, picture(640, 1280))
    assert len(tiles) + len(whole) == len(ours)
    return ours[: len(tiles)], [tiles]


def deepseekocr2(folder: Path) -> Compared:
    """With the row that ends the image, which llama.cpp adds to the last view."""
    vision = deepseekocr_tower(folder, "deepseekocr2")
    ours, theirs = of_equal_places("deepseekocr2", vision, picture(768, 1536))
    return ours, [torch.cat(theirs)]


def of_equal_places(family: str, vision: TowerPair, image: np.ndarray) -> Compared:
    """With one position for all places of the first encoder."""
    folder, places = vision.path.parent, "v.sam.pos_embd.weight"
    table = matrices(vision.path)[places]
    equal = np.ascontiguousarray(np.broadcast_to(table[:, :1, :1], table.shape))
    path = rewrite(vision.path, folder / "equal.gguf", tensors={places: equal})
    tower = load_tower(TOWERS[family].build, path)
    prepared = prepare(image, vision.tower.images, tower=b"")
    ours = encoded(tower, prepared.pixels[None], prepared.grid)[0]
    return ours, their_features(folder / "tiny.gguf", path, image, width=64)


def deepseekocr_tower(folder: Path, family: str = "deepseekocr", **changes: Any) -> TowerPair:
    """With the sizes of images that llama.cpp has whatever the file states, and a layer without
    windows where it has one."""
    sizes = {"image_size": 1024, "patch_size": 16, "window_size": 14, "hidden_size": 32}
    sizes |= {"num_hidden_layers": 3, "global_attn_indexes": [2]}
    return TOWERS[family].write(folder, **(sizes | changes))


def gemma3(folder: Path) -> Compared:
    family, image = TOWERS["gemma3"], picture(84, 84)
    vision = family.write(folder, flavour="llama.cpp")
    ours = encoded(vision.tower, STANDARD(image)[None])[0]
    return ours, their_features(folder / "tiny.gguf", vision.path, image, width=64)


def gemma4_unified(folder: Path) -> Compared:
    """An image whose number of squares makes llama.cpp neither enlarge nor shrink it."""
    family, image = TOWERS["gemma4_unified"], picture(96, 144)
    vision = family.write(folder)
    ours = encoded(vision.tower, UNCHANGED(image)[None], (8, 12))[0]
    return ours, their_features(folder / "tiny.gguf", vision.path, image, width=64)


def mistral3(folder: Path) -> Compared:
    """llama.cpp adds a row after each line of the image, and needs that row in the file."""
    family, image = TOWERS["mistral3"], picture(120, 168)
    vision = family.write(folder, flavour="llama.cpp", image_size=168)
    broken = rewrite(
        vision.path,
        folder / "broken.gguf",
        tensors={"v.token_embd.img_break": np.ones(64, dtype=np.float32)},
    )
    ours = encoded(load_tower(family.build, broken), CLIP(image)[None])[0]
    [theirs] = their_features(folder / "tiny.gguf", broken, image, width=64)
    lines = torch.nn.functional.pad(theirs, (0, 0, 0, 1)).unflatten(0, (10, 15))
    return ours, [lines[:, :14].flatten(0, 1)]


def lighton(folder: Path) -> Compared:
    """llama.cpp enlarges smaller images, unlike the authors' code, and norms the projector's input
    with the eps of the vision model."""
    family, image = TOWERS["lighton"], picture(120, 168)
    vision = family.write(folder, image_size=168)
    path = rewrite(vision.path, folder / "eps.gguf", own_keys={PROJECTOR_EPS: 1e-5})
    ours = encoded(load_tower(family.build, path), CLIP(image)[None])[0]
    return ours, their_features(text_of(folder, 64), vision.path, image, width=64)


def llama4(folder: Path) -> Compared:
    """llama.cpp reads a tile column by column, unlike the authors' code."""
    family, image = TOWERS["llama4"], picture(36, 36)
    vision = family.write(folder, flavour="llama.cpp")
    ours = encoded(vision.tower, STANDARD(image)[None, None])[0]
    theirs = their_features(folder / "tiny.gguf", vision.path, image, width=64)
    return ours, [part.unflatten(0, (3, 3)).transpose(0, 1).flatten(0, 1) for part in theirs]


def hunyuan_vl(folder: Path) -> Compared:
    family, image = TOWERS["hunyuan_vl"], picture(64, 96)
    vision = family.write(folder)
    areas = {"vision.image_min_pixels": 64 * 96, "vision.image_max_pixels": 64 * 96}
    path = rewrite(vision.path, folder / "sized.gguf", own_keys=areas)
    processor = BoundedProcessor(8, 2, *areas.values(), normalisation=CLIP)
    prepared = prepare(image, HunyuanProcessor(processor), tower=b"")
    ours = encoded(vision.tower, prepared.pixels[None], prepared.grid)[0]
    return ours, their_features(folder / "tiny.gguf", path, image, width=64)


def qwen25vl(folder: Path) -> Compared:
    return qwen(folder, TOWERS["qwen25vl"], patch=14, width=64, normalisation=CLIP)


def exaone45(folder: Path) -> Compared:
    """llama.cpp needs the limits of image sizes in the file."""
    family = TOWERS["exaone45"]
    return qwen(folder, family, patch=14, width=64, normalisation=CLIP, sized=True)


def qwen3vl(folder: Path) -> Compared:
    return qwen(folder, TOWERS["qwen3vl"], patch=16, width=192, normalisation=STANDARD)


def qwen35(folder: Path) -> Compared:
    """Without features for the first text layers."""
    sizes = {"patch": 16, "width": 64, "normalisation": STANDARD}
    return qwen(folder, TOWERS["qwen3vl"], config="no_deepstack", **sizes)


def qwen(
    folder: Path,
    family: TowerFamily,
    *,
    patch: int,
    width: int,
    normalisation: Normalisation,
    config: str = "plain",
    sized: bool = False,
) -> Compared:
    """sized: llama.cpp needs the bounds of images in the file."""
    unit = 2 * patch
    image, most = picture(8 * unit, 12 * unit), 96 * unit**2
    vision = family.write(folder, config, flavour="llama.cpp")
    bounds = {"vision.image_min_pixels": 1, "vision.image_max_pixels": most} if sized else {}
    path = rewrite(vision.path, folder / "sized.gguf", own_keys=bounds)
    processor = BoundedProcessor(
        patch=patch, merge=2, min_pixels=1, max_pixels=most, normalisation=normalisation
    )
    prepared = prepare(image, processor, tower=b"")
    ours = encoded(vision.tower, prepared.pixels[None], prepared.grid)[0]
    return ours, their_features(text_of(folder, width), path, image, width=width)


def glm4v(folder: Path) -> Compared:
    return qwen(folder, TOWERS["glm4v"], patch=14, width=64, normalisation=CLIP)


def glm_ocr(folder: Path) -> Compared:
    family = TOWERS["glm4v"]
    return qwen(folder, family, patch=14, width=64, normalisation=CLIP, config="glm_ocr")


def paddleocr(folder: Path) -> Compared:
    """No side of this image has fewer patches than the table of positions; llama.cpp smooths tables
    that become smaller, unlike the authors' code."""
    return qwen(folder, TOWERS["paddleocr"], patch=14, width=64, normalisation=CLIP, sized=True)


def idefics3(folder: Path) -> Compared:
    """Two by three tiles, without resizing, and the whole image; Pillow resizes in another order
    than llama.cpp where rows shrink more than columns."""
    model, image = VISION_MODELS["idefics3"].write(folder).model, picture(72, 108)
    prepared = prepare(image, model.vision.processor, tower=b"")
    ours = encoded(model.tower, prepared.pixels[None], prepared.grid)[0]
    files = folder / "tiny.gguf", folder / "mmproj-tiny.gguf"
    return ours, [torch.cat(their_features(*files, image, width=64))]


def lfm2(folder: Path) -> Compared:
    """Tiles of this picture have its aspect ratio; llama.cpp pads others, where the authors' code
    stretches them."""
    image = picture(576, 1152)
    vision = TOWERS["lfm2"].write(folder, patch_size=16)
    processor = read_processor(Metadata(GGUFFile.open(vision.path).metadata, path=vision.path))
    tower = load_tower(partial(Lfm2Tower, processor=processor), vision.path)
    prepared = prepare(image, processor, tower=b"")
    ours = encoded(tower, prepared.pixels[None], prepared.grid)[0]
    theirs = their_features(folder / "tiny.gguf", vision.path, image, width=64)
    assert [len(part) for part in theirs] == [256, 256, 11 * 22]
    return ours, [torch.cat(theirs)]


def internvl(folder: Path) -> Compared:
    """Two by three tiles and the whole image; llama.cpp chooses other grids for other shapes. It
    puts the class last but does not move the positions: a known defect."""
    model, image = VISION_MODELS["internvl"].write(folder).model, picture(72, 108)
    files = folder / "tiny.gguf", folder / "mmproj-tiny.gguf"
    prepared = prepare(image, model.vision.processor, tower=b"")
    shifted = shifted_positions(files[1], folder / "shifted.gguf")
    tower = load_tower(TOWERS["internvl"].build, shifted)
    ours = encoded(tower, prepared.pixels[None], prepared.grid)[0]
    return ours, [torch.cat(their_features(*files, image, width=64))]


def llava(folder: Path) -> Compared:
    """The same defect; the first patch is lost."""
    family, image = TOWERS["llava"], picture(36, 36)
    vision = family.write(folder, flavour="llama.cpp")
    shifted = shifted_positions(vision.path, folder / "shifted.gguf")
    ours = encoded(load_tower(family.build, shifted), CLIP(image)[None])[0]
    [theirs] = their_features(text_of(folder, 64), vision.path, image, width=64)
    return ours[1:], [theirs[:-1]]


def granite(folder: Path) -> Compared:
    """llama.cpp's rows of the whole image; tiles have no rows behind their lines there."""
    family, image = TOWERS["llava_next"], picture(36, 36)
    vision = family.write(folder, "granite")
    pixels = family.pixels(vision, 1, (36, 36))
    pixels[0, 0] = CLIP(image)
    ours = encoded(vision.tower, pixels, (36, 36))[0, :16]
    return ours, their_features(folder / "tiny.gguf", vision.path, image, width=64)[:1]


def shifted_positions(source: Path, target: Path) -> Path:
    """Each patch with the position before its own."""
    name = "v.position_embd.weight"
    return rewrite(source, target, tensors={name: np.roll(matrices(source)[name], 1, axis=0)})


def text_of(folder: Path, width: int) -> Path:
    path = folder / "text.gguf"
    write_tiny_llama(path, config=TinyLlama(hidden=width))
    return path


def minicpmv(folder: Path) -> Compared:
    """The slices alone, since it resizes the overview otherwise; it has 70 by 70 positions."""
    image, model = picture(*SLICED), VISION_MODELS["minicpmv"].write(folder, places=70).model
    prepared = prepare(image, model.vision.processor, tower=b"")
    ours = encoded(model.tower, prepared.pixels[None], prepared.grid)[0]
    files = folder / "tiny.gguf", folder / "mmproj-tiny.gguf"
    overview, *slices = their_features(*files, image, width=256)
    return ours[len(overview) :], [torch.cat(slices)]


def moondream(folder: Path) -> Compared:
    image, vision = picture(36, 36), TOWERS["moondream"].write(folder)
    ours = encoded(vision.tower, STANDARD(image)[None])[0]
    return ours, their_features(text_of(folder, 64), vision.path, image, width=64)


def minicpmv46(folder: Path) -> Compared:
    """The slices alone, of the same size without resizing; it has 70 by 70 positions."""
    image, row = picture(*LARGER_SLICED), VISION_MODELS["minicpmv46"]
    model = row.write(folder, image_size=70 * 4).model
    prepared = prepare(image, model.vision.processor, tower=b"")
    ours = encoded(model.tower, prepared.pixels[None], prepared.grid)[0]
    files = folder / "tiny.gguf", folder / "mmproj-tiny.gguf"
    _, *slices = their_features(*files, image, width=64)
    return ours[-sum(map(len, slices)) :], [torch.cat(slices)]


def step3vl(folder: Path) -> Compared:
    """The whole image alone: llama.cpp always has windows of 504 pixels, and scales without
    filters."""
    family, image = TOWERS["step3vl"], picture(64, 64)
    vision = family.write(folder)
    prepared = prepare(image, vision.tower.images, tower=b"")
    ours = encoded(vision.tower, prepared.pixels[None], prepared.grid)[0]
    return ours, their_features(text_of(folder, 64), vision.path, image, width=64)


def kimivl(folder: Path) -> Compared:
    """llama.cpp turns the first half of a head by columns and the second by rows, but its converter
    keeps the order of the checkpoint, in which they alternate: a known defect. It stretches
    positions otherwise, so this image has as many patches as there are positions."""
    image, model = picture(224, 224), VISION_MODELS["kimivl"].write(folder).model
    prepared = prepare(image, model.vision.processor, tower=b"")
    ours = encoded(model.tower, prepared.pixels[None], prepared.grid)[0]
    source = folder / "mmproj-tiny.gguf"
    apart = {
        name: rows.reshape(3, -1, 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        for name, rows in matrices(source).items()
        if ".attn_q." in name or ".attn_k." in name
    }
    ordered = rewrite(source, folder / "ordered.gguf", tensors=apart)
    return ours, their_features(text_of(folder, 64), ordered, image, width=64)


FAMILIES: dict[str, Callable[[Path], Compared]] = {
    family.__name__: family
    for family in (
        deepseekocr,
        deepseekocr_tiles,
        deepseekocr2,
        exaone45,
        gemma3,
        gemma4_unified,
        hunyuan_vl,
        mistral3,
        llama4,
        qwen25vl,
        qwen3vl,
        qwen35,
        glm4v,
        glm_ocr,
        idefics3,
        internvl,
        kimivl,
        lfm2,
        lighton,
        paddleocr,
        llava,
        granite,
        minicpmv,
        minicpmv46,
        moondream,
        step3vl,
    )
}


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same_features(tmp_path, family) -> None:
    ours, [theirs] = FAMILIES[family](tmp_path)
    assert worst(ours, theirs) <= NEAR_OF_FAMILY.get(family, NEAR)


@pytest.mark.parametrize(
    ("family", "changes", "size"),
    [
        ("minicpmv", {"version": 2}, SLICED),
        ("minicpmv", {"version": 3}, SLICED),
        ("minicpmv46", {"image_size": 70 * 4}, LARGER_SLICED),
    ],
)
def test_llama_cpp_marks_the_slices_of_minicpmv_alike(tmp_path, family, changes, size) -> None:
    model = VISION_MODELS[family].write(tmp_path, **changes).model
    pieces = model.vision.placeholders.pieces(model.vision.processor.outline(*size))
    shown = [[p.length] if isinstance(p, PlaceholderRows) else p for p in pieces]
    ours: list[int | list[int]] = []
    for piece in shown:
        ours += model.tokenizer.encode(piece) if isinstance(piece, str) else [piece]
    files = tmp_path / "tiny.gguf", tmp_path / "mmproj-tiny.gguf"
    assert their_layout(*files, picture(*size)) == ours
