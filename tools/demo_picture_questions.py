"""Questions about the drawn pictures, each in many wordings with one right answer.

A checksum of a question's words reserves it, as one of an item reserves the item: in training no
question is ever put in a reserved sentence, and a held-out question always is.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tools.demo_pictures import COLOURS, HELD_OUT_PERCENT, MIDDLE, PLACES, SHAPES, Item, Picture

# How a part of a picture is called, the first name being that of the answer -> its places.
REGIONS = {
    "on the left|on the left side": (0, 3, 6),
    "on the right|on the right side": (2, 5, 8),
    "at the top|in the upper part": (0, 1, 2),
    "at the bottom|in the lower part": (6, 7, 8),
    "in the middle|in the centre|in the center": (MIDDLE,),
    "at the top left|in the top left corner|in the upper left corner": (0,),
    "at the top right|in the top right corner|in the upper right corner": (2,),
    "at the bottom left|in the bottom left corner|in the lower left corner": (6,),
    "at the bottom right|in the bottom right corner|in the lower right corner": (8,),
}
DIRECTIONS = {
    "left of": "left of|to the left of|further left than",
    "right of": "right of|to the right of|further right than",
    "above": "above|over|higher than",
    "below": "below|under|lower than",
}
REVERSED = dict(zip(DIRECTIONS, ("right of", "left of", "below", "above"), strict=True))
OPENERS = "Please tell me: |Caravan, |Hi, |OK, |Now: |Look: |So, |Hey, |Tell me, |Hmm, ".split("|")

SHAPE = (
    "What shape is {x}{here}?|Which shape is {x}{here}?|Tell me the shape of {x}{here}.|"
    "What is the shape of {x}{here}?|What kind of shape is {x}{here}?|What form has {x}{here}?|"
    "What shape does {x} have{here}?|Name the shape of {x}{here}.|Is {x} {a} or {b}{here}?"
).split("|")
COLOUR = (
    "What colour is {x}{here}?|Which colour is {x}{here}?|What color is {x}{here}?|"
    "What is the colour of {x}{here}?|Tell me the colour of {x}{here}.|Is {x} {a} or {b}{here}?|"
    "Which colour has {x}{here}?|What is the color of {x}{here}?|Name the colour of {x}{here}.|"
    "What colour does {x} have{here}?|Which color does {x} have{here}?"
).split("|")
WHERE = (
    "Where is {x}{here}?|Where do you see {x}{here}?|Where can I find {x}{here}?|"
    "What is the position of {x}{here}?|Tell me where {x} is{here}.|Where exactly is {x}{here}?|"
    "In which part is {x}{here}?|Where is {x} placed{here}?|Where does {picture} show {x}?"
).split("|")
WHAT_IS = (
    "What is {x}{here}?|What do you see {x}{here}?|What can you see {x}{here}?|"
    "Tell me what is {x}{here}.|What is there {x}{here}?|What is shown {x}{here}?|"
    "What does {picture} show {x}?|What can be seen {x}{here}?|What is drawn {x}{here}?"
).split("|")
HOW_MANY = (
    "How many {x} are there{here}?|How many {x} do you see{here}?|How many {x} can you see{here}?|"
    "Count the {x}{here}.|What is the number of {x}{here}?|How many {x} does {picture} show?|"
    "How many {x} are in {picture}?|Tell me how many {x} there are{here}.|Number of {x}{here}?|"
    "How many {x} can be seen{here}?|How many {x} does {picture} have?"
).split("|")
NUMBER = (
    "What number do you see{here}?|Which number is in {picture}?|What number is this{here}?|"
    "Read the number{here}.|Which number does {picture} show?|What does the number say{here}?|"
    "Which number can you see{here}?|Tell me the number{here}.|What number is shown{here}?|"
    "What is the number{here}?|Can you read the number{here}?|Which number is it{here}?"
).split("|")
DESCRIBE = (
    "What do you see{here}?|Describe {picture}.|What is in {picture}?|What does {picture} show?|"
    "Tell me what you see{here}.|What is shown{here}?|What can you see{here}?|"
    "What is on {picture}?|Describe what you see{here}.|Say what is in {picture}.|"
    "Can you describe {picture}?|What can be seen{here}?|Tell me what {picture} shows.|"
    "Give a description of {picture}."
).split("|")
EXISTS = (
    "Is there {x}{here}?|Do you see {x}{here}?|Can you see {x}{here}?|Does {picture} show {x}?|"
    "Is {x} in {picture}?|Does {picture} have {x}?|Can you find {x}{here}?|Is {x} shown{here}?|"
    "Is there {x} anywhere{here}?"
).split("|")
IS = (
    "Is {x} {c}{here}?|Is it true that {x} is {c}{here}?|Is the colour of {x} {c}{here}?|"
    "Would you say that {x} is {c}{here}?|Is the color of {x} {c}{here}?|"
    "Do you see that {x} is {c}{here}?"
).split("|")
RELATED = (
    "Is {x} {r} {y}{here}?|Is it true that {x} is {r} {y}{here}?|Do you see {x} {r} {y}{here}?|"
    "Would you say that {x} is {r} {y}{here}?"
).split("|")
BACKGROUND = (
    "Is the background light or dark{here}?|What is the background like{here}?|"
    "How is the background{here}?|Is the background dark{here}?|Is the background light{here}?|"
    "Is the background dark or light{here}?|Tell me how the background is{here}.|"
    "Does {picture} have a light or a dark background?|Describe the background of {picture}."
).split("|")
# What may be left out once something like it was asked.
AND = "And {x}?|What about {x}?|And what about {x}?|How about {x}?|Now {x}?".split("|")
ELLIPSES = {
    "colour": [*AND, "And the colour of {x}?", "And what colour is {x}?", "What colour has {x}?"],
    "place": [*AND, "And where is {x}?", "And the position of {x}?", "And where do you see {x}?"],
    "region": [*AND, "And what is {x}?", "And what do you see {x}?"],
    "counting": [*AND, "And how many {x}?", "How many {x}?", "And the number of {x}?"],
    "existence": [*AND, "And is there {x}?", "Is there {x} too?", "Is there also {x}?"],
}
ABOUT_IT = {
    "colour": (
        "What colour is it?|Which colour is it?|What color is it?|And what colour is it?|"
        "And its colour?|Which colour does it have?|What is its colour?|And which colour?"
    ).split("|"),
    "place": (
        "Where is it?|And where is it?|Where exactly is it?|And its position?|And where?|"
        "In which part is it?|What is its position?|Where exactly?|Where do you see it?"
    ).split("|"),
    "shape": (
        "What shape is it?|Which shape is it?|And what shape is it?|And its shape?|"
        "What is its shape?|And which shape?|What kind of shape is it?|Which shape does it have?"
    ).split("|"),
}


class View(NamedTuple):
    """How a question calls the picture that it is about."""

    here: str
    picture: str


class Turn(NamedTuple):
    """A question with its only right answer; `about`: what "it" means from then on."""

    question: str
    answer: str
    subject: str = ""
    about: Item | None = None


Skill = Callable[[Random, Picture, View, Sequence[str]], Turn | None]

THIS = tuple(
    View(here, picture)
    for here in ("", "", "", "", " here", " in the picture", " in this picture", " in the image")
    for picture in ("the picture", "this picture", "the image")
)
FIRST, SECOND = (
    tuple(View(f" in the {word} {noun}", f"the {word} {noun}") for noun in ("picture", "image"))
    for word in ("first", "second")
)


def is_reserved_question(question: str) -> bool:
    """Whether only held-out questions are put in these words, whatever their case and mark."""
    words = question.casefold().rstrip("?.! ")
    return zlib.crc32(words.encode()) % 100 < HELD_OUT_PERCENT


def worded(rng: Random, wording: str, view: View, **fields: str) -> str:
    """Fill a wording, sometimes as careless users type it: other case, no final mark, an opener."""
    question = wording.format(here=view.here, picture=view.picture, **fields)
    if rng.random() < 0.25:
        question = rng.choice(OPENERS) + question[0].lower() + question[1:]
    if rng.random() < 0.12:
        question = question.lower()
    return question.rstrip("?.") if rng.random() < 0.12 else question


def in_words(make: Callable[[], Turn | None], *, held: bool) -> Turn | None:
    """What `make` makes, once its sentence is one of the split."""
    for _ in range(60):
        turn = make()
        if turn is None or is_reserved_question(turn.question) == held:
            return turn
    return None


def named(item: Item) -> str:
    """With its article: "a red circle", "an orange 47"."""
    return _a(f"{item.colour} {item.shape}")


def count_of(picture: Picture, noun: tuple[str | None, str | None]) -> int:
    """Shapes of a colour and a kind; None stands for any."""
    colour, kind = noun
    return sum(
        colour in (None, item.colour) and kind in (None, item.shape) for item in picture.shapes
    )


def counted(count: int, noun: tuple[str | None, str | None]) -> str:
    """As the object of "there is": "1 circle", "3 red shapes", "no stars"."""
    words = " ".join(filter(None, (noun[0], noun[1] or "shape")))
    return f"{count or 'no'} {words if count == 1 else plural(words)}"


def plural(words: str) -> str:
    return words + ("es" if words.endswith("ss") else "s")


def any_noun(rng: Random, pictures: Sequence[Picture]) -> tuple[str | None, str | None]:
    """Any shapes, those of a colour, of a kind or of both; mostly such as there are."""
    shapes = [item for picture in pictures for item in picture.shapes]
    if not shapes or rng.random() < 0.25:
        looks = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    else:
        looks = rng.choice(shapes).looks
    colour, kind = rng.choice(((False, False), (True, False), (False, True), (True, True)))
    return looks[0] if colour else None, looks[1] if kind else None


def noun_words(rng: Random, noun: tuple[str | None, str | None]) -> str:
    """In the singular; what has no kind has many names."""
    kind = noun[1] or rng.choice(("shape", "shape", "object", "thing", "figure"))
    return " ".join(filter(None, (noun[0], kind)))


def unique_names(picture: Picture, *, by: str) -> dict[str, Item]:
    """What calls one item and no other, by "looks", by "colour", by "shape" or by "region"."""
    names: dict[str, Item] = {}
    counts = Counter(getattr(item, by) for item in picture.items if by != "region")
    for item in picture.items:
        if item.is_number and by in ("looks", "shape"):
            names["the number"] = item
        elif by == "region" and not picture.number:
            for region, places in REGIONS.items():
                if [other for other in picture.items if other.place in places] == [item]:
                    names |= {f"the shape {name}": item for name in region.split("|")}
        elif by != "region" and counts[getattr(item, by)] == 1:
            words = " ".join(item.looks) if by == "looks" else getattr(item, by)
            ends = ("shape", "one", "object") if by == "colour" else ("",)
            names |= {f"the {words} {end}".strip(): item for end in ends}
    if len(picture.items) == 1 and not picture.number:
        names |= dict.fromkeys(("the shape", "the object"), picture.items[0])
    return names


def _a(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _pick(rng: Random, names: dict[str, Item]) -> tuple[str, Item] | None:
    return rng.choice(list(names.items())) if names else None


def _shape(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    by_colour = {} if picture.number else unique_names(picture, by="colour")
    picked = _pick(rng, by_colour | unique_names(picture, by="region"))
    if picked is None:
        return None
    name, item = picked
    choice = [item.shape, rng.choice([kind for kind in SHAPES if kind != item.shape])]
    first, second = (_a(kind) for kind in rng.sample(choice, 2))
    question = worded(rng, rng.choice(wordings), view, x=name, a=first, b=second)
    return Turn(question, shape_answer(item), name, item)


def _colour(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    names = unique_names(picture, by="shape") | unique_names(picture, by="region")
    picked = _pick(rng, names)
    if picked is None:
        return None
    name, item = picked
    choice = [item.colour, rng.choice([other for other in COLOURS if other != item.colour])]
    first, second = rng.sample(choice, 2)
    question = worded(rng, rng.choice(wordings), view, x=name, a=first, b=second)
    return Turn(question, colour_answer(item), name, item)


def shape_answer(item: Item) -> str:
    return f"It is {_a(item.shape)}."


def colour_answer(item: Item) -> str:
    return f"It is {item.colour}."


def place_answer(item: Item) -> str:
    return f"It is {PLACES[item.place]}."


def _place(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    names = unique_names(picture, by="looks") | unique_names(picture, by="shape")
    if not picture.number:
        names |= unique_names(picture, by="colour")
    picked = _pick(rng, names)
    if picked is None:
        return None
    name, item = picked
    question = worded(rng, rng.choice(wordings), view, x=name)
    return Turn(question, place_answer(item), name, item)


def _region(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    region = rng.choice(list(REGIONS))
    found = [item for item in picture.items if item.place in REGIONS[region]]
    if len(found) > 1 or (not found and rng.random() < 0.7):
        return None
    names = region.split("|")
    said = named(found[0]) if found else "nothing"
    answer = f"{said[0].upper()}{said[1:]} is {names[0]}."
    question = worded(rng, rng.choice(wordings), view, x=rng.choice(names))
    return Turn(question, answer, names[0], found[0] if found else None)


def _counting(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """Not where a number is: some would count it as a thing."""
    if picture.number:
        return None
    noun = any_noun(rng, [picture])
    words = noun_words(rng, noun)
    count = count_of(picture, noun)
    answer = f"There {'is' if count == 1 else 'are'} {counted(count, noun)}."
    question = worded(rng, rng.choice(wordings), view, x=plural(words))
    return Turn(question, answer, " ".join(filter(None, noun)))


def _number(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    item = picture.number
    if item is None:
        return None
    question = worded(rng, rng.choice(wordings), view)
    return Turn(question, f"The number is {item.shape}.", "the number", item)


def _description(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """Items in reading order; where they are, only of up to three."""
    items = picture.items
    if len(items) > 3:
        told = [named(item) for item in items]
    else:
        told = [f"{named(item)} {PLACES[item.place]}" for item in items]
    answer = f"I see {', '.join(told[:-1])}{' and ' if told[1:] else ''}{told[-1]}."
    about = items[0] if len(items) == 1 else None
    return Turn(worded(rng, rng.choice(wordings), view), answer, "all", about)


def _existence(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """Half of the answers are no, many of them for a colour and a kind that never meet."""
    noun = any_noun(rng, [picture])
    if rng.random() < 0.4 and picture.shapes:
        noun = rng.choice(picture.shapes).colour, rng.choice(picture.shapes).shape
    if noun == (None, None) or (noun[1] is None and picture.number):
        return None
    count = count_of(picture, noun)
    words = counted(1, noun).removeprefix("1 ")
    answer = f"Yes, there is {_a(words)}." if count else f"No, there is no {words}."
    if count > 1 and rng.random() < 0.5:
        return None
    question = worded(rng, rng.choice(wordings), view, x=_a(noun_words(rng, noun)))
    return Turn(question, answer, words)


def _truth(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    picked = _pick(rng, unique_names(picture, by="shape"))
    if picked is None:
        return None
    name, item = picked
    told = rng.choice((item.colour, rng.choice(list(COLOURS)), rng.choice(picture.items).colour))
    answer = f"{'Yes' if told == item.colour else 'No'}, it is {item.colour}."
    question = worded(rng, rng.choice(wordings), view, x=name, c=told)
    return Turn(question, answer, name, item)


def _relation(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """Between two whose kinds (or looks) are unique, along an axis on which they differ."""
    names = unique_names(picture, by=rng.choice(("shape", "looks")))
    names = {name: item for name, item in names.items() if name not in ("the shape", "the object")}
    if len(names) < 2:
        return None
    (name, item), (other_name, other) = rng.sample(list(names.items()), 2)
    told = rng.choice(list(DIRECTIONS))
    along = "column" if told in ("left of", "right of") else "row"
    before, after = getattr(item, along), getattr(other, along)
    if before == after:
        return None
    true = (before < after) == (told in ("left of", "above"))
    said = f"Yes, it is {told}" if true else f"No, it is {REVERSED[told]}"
    asked = rng.choice(DIRECTIONS[told].split("|"))
    question = worded(rng, rng.choice(wordings), view, x=name, y=other_name, r=asked)
    return Turn(question, f"{said} {other_name}.", name, item)


def _background(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    answer = f"The background is {'light' if picture.background.light else 'dark'}."
    return Turn(worded(rng, rng.choice(wordings), view), answer, "background")


# About one picture: how it is asked, and in which words.
SKILLS: dict[str, tuple[Skill, list[str]]] = {
    "shape": (_shape, SHAPE),
    "colour": (_colour, COLOUR),
    "place": (_place, WHERE),
    "region": (_region, WHAT_IS),
    "counting": (_counting, HOW_MANY),
    "number": (_number, NUMBER),
    "description": (_description, DESCRIBE),
    "existence": (_existence, EXISTS),
    "truth": (_truth, IS),
    "relation": (_relation, RELATED),
    "background": (_background, BACKGROUND),
}
