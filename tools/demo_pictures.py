"""The pictures of the demo model's training: their content, and how they are drawn.

A picture is a list of facts (which items, where, on which background), from which pixels are drawn.
A checksum of an item's colour, shape and place decides whether it is held out: training pictures
show no held-out item, held-out pictures show nothing else. So no held-out picture shares an item
with training.
"""

import io
import math
import zlib
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HELD_OUT_PERCENT = 15
SMALLEST = 64  # pixels; a star in a smaller picture has no visible points

COLOURS = {
    "red": (220, 35, 40),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "purple": (135, 45, 175),
    "pink": (250, 125, 190),
    "brown": (115, 65, 35),
    "black": (18, 18, 18),
    "white": (248, 248, 248),
}
SHAPES = "circle square triangle star heart diamond cross".split()
# In reading order; a place is an index into this tuple.
PLACES = (
    "at the top left|at the top|at the top right|on the left|in the middle|on the right|"
    "at the bottom left|at the bottom|at the bottom right"
).split("|")
MIDDLE = 4

# Every item is inside its ninth of the picture, with a gap to the next one.
_HALF_CELL = 1 / 6 - 0.012
_SMALLEST_SHAPE, _SMALLEST_NUMBER, _LARGEST = 0.095, 0.135, 0.145
_NEAREST_COLOURS = 110.0  # least distance between an item's colour and the background, in RGB units
_OVERSAMPLING = 4
_GLYPH_PIXELS = 64


@dataclass(frozen=True, slots=True)
class Item:
    """A shape or a number. `x`, `y` and `radius` are fractions of the side; `turn` is in degrees.

    The shape of a number is its digits. It fits a box with `radius` on each side.
    """

    colour: str
    shape: str
    place: int
    x: float
    y: float
    radius: float
    turn: float
    shade: tuple[int, int, int]
    font: str = "plain"

    @property
    def is_number(self) -> bool:
        return self.shape.isdigit()

    @property
    def row(self) -> int:
        return self.place // 3

    @property
    def column(self) -> int:
        return self.place % 3

    @property
    def looks(self) -> tuple[str, str]:
        return self.colour, self.shape

    @property
    def facts(self) -> tuple[str, str, int]:
        """The properties that questions are about; all other properties are random."""
        return self.colour, self.shape, self.place


@dataclass(frozen=True, slots=True)
class Background:
    """A gradient from `start` to `end` in a direction (degrees), with noise of some strength."""

    light: bool
    start: tuple[int, int, int]
    end: tuple[int, int, int]
    direction: float
    noise: float
    seed: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Items in reading order, one per place; pictures for questions have at most one number."""

    items: tuple[Item, ...]
    background: Background

    @property
    def shapes(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if not item.is_number)

    @property
    def number(self) -> Item | None:
        return next((item for item in self.items if item.is_number), None)


def invent(rng: Random, *, held: bool, shapes: int | None = None, number: bool = False) -> Picture:
    """A picture of the training or the held-out split with `shapes` shapes (default: 1 to 5), and
    possibly a number."""
    if shapes is None:
        shapes = rng.choice((1, 1, 2, 2, 3, 3, 4, 5))
    while True:
        background = _background(rng)
        items = _items(rng, background, shapes, number, held)
        if len(items) == shapes + number:
            return Picture(items, background)


def invent_crowd(rng: Random) -> Picture:
    """A picture for training the vision model: most places have an item, half of them numbers."""
    background = _background(rng)
    colours = visible(background)
    items = []
    for place in sorted(rng.sample(range(len(PLACES)), rng.randint(6, 9))):
        while True:
            shape = _digits(rng) if rng.random() < 0.5 else rng.choice(SHAPES)
            colour = rng.choice(colours)
            if not is_reserved(colour, shape, place):
                break
        items.append(make_item(rng, colour, shape, place))
    return Picture(tuple(items), background)


def is_reserved(colour: str, shape: str, place: int) -> bool:
    """Whether such an item belongs to held-out pictures only."""
    return zlib.crc32(f"{colour} {shape} {place}".encode()) % 100 < HELD_OUT_PERCENT


def draw(picture: Picture, size: int) -> Image.Image:
    """RGB, `size` pixels per side, at least SMALLEST; equal pictures have equal pixels."""
    assert size >= SMALLEST, size
    image = _painted(picture.background, size)
    for item in picture.items:
        centre = item.x * size, item.y * size
        left, top = (math.floor(middle - item.radius * size) - 1 for middle in centre)
        inside = centre[0] - left, centre[1] - top
        mask = _number_mask if item.is_number else _shape_mask
        image.paste(item.shade, (left, top), mask(item, inside, item.radius * size))
    return _noisy(image, picture.background)


def png(picture: Picture, size: int) -> bytes:
    data = io.BytesIO()
    draw(picture, size).save(data, "PNG")
    return data.getvalue()


def _items(
    rng: Random, background: Background, shapes: int, number: bool, held: bool
) -> tuple[Item, ...]:
    """The items of a picture: few kinds and colours, so that equal ones are common and can be
    counted.

    There are fewer items than asked for if the split has none of these kinds and colours for some
    place.
    """
    places = sorted(rng.sample(range(len(PLACES)), shapes + number))
    colours = rng.sample(visible(background), rng.randint(1, 4))
    kinds = rng.sample(SHAPES, rng.randint(1, 4))
    digits = rng.choice(places) if number else None
    items = []
    for place in places:
        shown = [_digits(rng) for _ in range(8)] if place == digits else kinds
        looks = [(colour, kind) for colour in colours for kind in shown]
        looks = [look for look in looks if is_reserved(*look, place) == held]
        if looks:
            items.append(make_item(rng, *rng.choice(looks), place))
    return tuple(items)


def _digits(rng: Random) -> str:
    return str(rng.choice((rng.randint(0, 9), rng.randint(0, 99), rng.randint(0, 99))))


def make_item(rng: Random, colour: str, shape: str, place: int) -> Item:
    """An item with random other properties."""
    smallest = _SMALLEST_NUMBER if shape.isdigit() else _SMALLEST_SHAPE
    radius = rng.uniform(smallest, _LARGEST)
    tilt = {"circle": 0.0, "star": 36.0}.get(shape, 12.0)
    return Item(
        colour,
        shape,
        place,
        _centre(rng, place % 3, radius),
        _centre(rng, place // 3, radius),
        radius,
        rng.uniform(-tilt, tilt),
        _shade(rng, COLOURS[colour], 7),
        rng.choice(("plain", "bold")) if shape.isdigit() else "plain",
    )


def _centre(rng: Random, third: int, radius: float) -> float:
    slack = _HALF_CELL - radius
    return (third + 0.5) / 3 + rng.uniform(-slack, slack)


def _background(rng: Random) -> Background:
    light = rng.random() < 0.6
    plain = rng.random() < 0.3
    if plain:
        start = end = (255, 255, 255) if light else (0, 0, 0)
    else:
        start, end = _tint(rng, light), _tint(rng, light)
    noise = 0.0 if plain else rng.choice((0.0, 2.0, 5.0, 8.0))
    return Background(light, start, end, rng.uniform(0, 360), noise, rng.getrandbits(32))


def _tint(rng: Random, light: bool) -> tuple[int, int, int]:
    low, high = (205, 255) if light else (5, 60)
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def _shade(rng: Random, colour: tuple[int, int, int], spread: int) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + rng.randint(-spread, spread))) for part in colour)
    return red, green, blue


def visible(background: Background) -> list[str]:
    """The colours with enough contrast to both ends of the gradient."""
    ends = background.start, background.end
    return [
        name
        for name, colour in COLOURS.items()
        if min(math.dist(colour, end) for end in ends) > _NEAREST_COLOURS
    ]


def _painted(background: Background, size: int) -> Image.Image:
    angle = math.radians(background.direction)
    steps = np.linspace(-0.5, 0.5, size)
    along = steps[:, None] * math.sin(angle) + steps[None, :] * math.cos(angle)
    share = (along - along.min()) / (along.max() - along.min())
    start, end = np.array(background.start), np.array(background.end)
    pixels = start + share[:, :, None] * (end - start)
    return Image.fromarray(pixels.round().astype(np.uint8))


def _noisy(image: Image.Image, background: Background) -> Image.Image:
    if not background.noise:
        return image
    noise = np.random.default_rng(background.seed).normal(0, background.noise, (*image.size, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).round().astype(np.uint8))


def _shape_mask(item: Item, centre: tuple[float, float], radius: float) -> Image.Image:
    """The coverage of pixels by a shape around `centre`, smooth at the edges."""
    side = math.ceil(2 * radius) + 3
    mask = Image.new("L", (side * _OVERSAMPLING, side * _OVERSAMPLING))
    angle = math.radians(item.turn)
    cos, sin = math.cos(angle) * radius, math.sin(angle) * radius
    points = [
        (
            (centre[0] + x * cos - y * sin) * _OVERSAMPLING,
            (centre[1] + x * sin + y * cos) * _OVERSAMPLING,
        )
        for x, y in _outline(item.shape)
    ]
    ImageDraw.Draw(mask).polygon(points, fill=255)
    return mask.reduce(_OVERSAMPLING)


@cache
def _outline(shape: str) -> list[tuple[float, float]]:
    """The corners of a shape in the unit circle, with y downwards; a square's corners are slightly
    outside."""
    arm = 0.34
    corners = [(arm, -arm), (1.0, -arm), (1.0, arm), (arm, arm)]
    outlines = {
        "circle": [_on_circle(step / 48) for step in range(48)],
        "square": [(0.83, -0.83), (0.83, 0.83), (-0.83, 0.83), (-0.83, -0.83)],
        "triangle": [_on_circle(step / 3) for step in range(3)],
        "star": [_on_circle(step / 10, 0.42 if step % 2 else 1.0) for step in range(10)],
        "heart": [_on_heart(step / 48) for step in range(48)],
        "diamond": [(0.0, -1.0), (0.68, 0.0), (0.0, 1.0), (-0.68, 0.0)],
        "cross": [point for quarter in range(4) for point in _turned(corners[1:], quarter)],
    }
    return outlines[shape]


def _on_circle(share: float, radius: float = 1.0) -> tuple[float, float]:
    """The point at a share of the circle, clockwise from the top."""
    return radius * math.sin(2 * math.pi * share), -radius * math.cos(2 * math.pi * share)


def _on_heart(share: float) -> tuple[float, float]:
    t = 2 * math.pi * share
    y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
    return math.sin(t) ** 3, -(y + 2.5) / 16


def _turned(points: list[tuple[float, float]], quarters: int) -> list[tuple[float, float]]:
    for _ in range(quarters):
        points = [(-y, x) for x, y in points]
    return points


def _number_mask(item: Item, centre: tuple[float, float], radius: float) -> Image.Image:
    side = math.ceil(2 * radius) + 3
    glyphs = _glyphs(item.shape, item.font).rotate(
        -item.turn, Image.Resampling.BICUBIC, expand=True
    )
    scale = 2 * radius / max(glyphs.size)
    width, height = (max(1, round(length * scale)) for length in glyphs.size)
    mask = Image.new("L", (side, side))
    corner = round(centre[0] - width / 2), round(centre[1] - height / 2)
    mask.paste(glyphs.resize((width, height), Image.Resampling.LANCZOS), corner)
    return mask


@cache
def _glyphs(digits: str, font: str) -> Image.Image:
    """The digits in white on black, cropped to their bounding box."""
    canvas = Image.new("L", (4 * _GLYPH_PIXELS, 2 * _GLYPH_PIXELS))
    face = ImageFont.load_default(_GLYPH_PIXELS)
    stroke = 3 if font == "bold" else 1
    ImageDraw.Draw(canvas).text((16, 16), digits, fill=255, font=face, stroke_width=stroke)
    return canvas.crop(canvas.getbbox())
