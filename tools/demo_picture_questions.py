"""Questions about the drawn pictures, each in many wordings with one right answer.

A checksum of a question's words decides whether the sentence is held out, as for items. Training
uses no held-out sentence, and a held-out question always is one.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tools.demo_picture_wordings import (
    BACKGROUND,
    COLOUR,
    DESCRIBE,
    EXISTS,
    HOW_MANY,
    IS,
    NUMBER,
    OPENERS,
    RELATED,
    SHAPE,
    WHAT_IS,
    WHERE,
)
from tools.demo_pictures import COLOURS, HELD_OUT_PERCENT, MIDDLE, PLACES, SHAPES, Item, Picture

# The names of a part of a picture -> its places. Answers use the first name.
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


class View(NamedTuple):
    """The words by which a question refers to its picture."""

    here: str
    picture: str


class Turn(NamedTuple):
    """A question with its only right answer; `about`: what "it" refers to afterwards."""

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
    """Whether these words are held out, ignoring case and final mark."""
    words = question.casefold().rstrip("?.! ")
    return zlib.crc32(words.encode()) % 100 < HELD_OUT_PERCENT


def worded(rng: Random, wording: str, view: View, **fields: str) -> str:
    """Fills a wording, sometimes in another case, without the final mark, or with an opener."""
    question = wording.format(here=view.here, picture=view.picture, **fields)
    if rng.random() < 0.25:
        question = rng.choice(OPENERS) + question[0].lower() + question[1:]
    if rng.random() < 0.12:
        question = question.lower()
    return question.rstrip("?.") if rng.random() < 0.12 else question


def in_words(make: Callable[[], Turn | None], *, held: bool) -> Turn | None:
    """Calls `make` until the sentence belongs to the split."""
    for _ in range(60):
        turn = make()
        if turn is None or is_reserved_question(turn.question) == held:
            return turn
    return None


def named(item: Item) -> str:
    """The item's name with its article: "a red circle", "an orange 47"."""
    return _a(f"{item.colour} {item.shape}")


def fits(item: Item, noun: tuple[str | None, str | None]) -> bool:
    """Whether the item has this colour and kind; None matches any."""
    return noun[0] in (None, item.colour) and noun[1] in (None, item.shape)


def answer_words(noun: tuple[str | None, str | None]) -> str:
    """The singular of a noun as in answers: "circle", "red shape"."""
    return " ".join(filter(None, (noun[0], noun[1] or "shape")))


def plural(words: str) -> str:
    return words + ("es" if words.endswith("ss") else "s")


def any_noun(rng: Random, pictures: Sequence[Picture]) -> tuple[str | None, str | None]:
    """A random noun: all shapes, or those of a colour, of a kind or of both. Usually some of them
    are in the pictures."""
    shapes = [item for picture in pictures for item in picture.shapes]
    if not shapes or rng.random() < 0.25:
        looks = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    else:
        looks = rng.choice(shapes).looks
    colour, kind = rng.choice(((False, False), (True, False), (False, True), (True, True)))
    return looks[0] if colour else None, looks[1] if kind else None


def noun_words(rng: Random, noun: tuple[str | None, str | None]) -> str:
    """The singular of a noun in a question; a noun for any kind has several names."""
    kind = noun[1] or rng.choice(("shape", "shape", "object", "thing", "figure"))
    return " ".join(filter(None, (noun[0], kind)))


def unique_names(picture: Picture, *, by: str) -> dict[str, Item]:
    """Words that identify a single item, by "looks", "colour", "shape" or "region"."""
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


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])}{' and ' if words[1:] else ''}{words[-1]}"


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
    other = rng.choice([kind for kind in SHAPES if kind != item.shape])
    first, second = rng.sample([_a(item.shape), _a(other)], 2)
    question = worded(rng, rng.choice(wordings), view, x=name, a=first, b=second)
    return Turn(question, said_of(name, _a(item.shape)), name, item)


def _colour(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    picked = _pick(rng, unique_names(picture, by="shape") | unique_names(picture, by="region"))
    if picked is None:
        return None
    name, item = picked
    other = rng.choice([colour for colour in COLOURS if colour != item.colour])
    first, second = rng.sample([item.colour, other], 2)
    question = worded(rng, rng.choice(wordings), view, x=name, a=first, b=second)
    return Turn(question, said_of(name, item.colour), name, item)


def said_of(name: str, what: str) -> str:
    """An answer that repeats its subject, so that each word follows from the ones before it."""
    return f"{_capital(name)} is {what}."


def said_of_it(asked: str, item: Item) -> str:
    """An answer to a question about "it"; `asked`: "colour", "shape" or "place"."""
    if asked == "shape":
        return said_of(f"the {item.colour} shape", _a(item.shape))
    name = "the number" if item.is_number else f"the {item.shape}"
    return said_of(name, item.colour if asked == "colour" else PLACES[item.place])


def _place(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    by_colour = {} if picture.number else unique_names(picture, by="colour")
    looks = unique_names(picture, by="looks")
    picked = _pick(rng, looks | unique_names(picture, by="shape") | by_colour)
    if picked is None:
        return None
    name, item = picked
    question = worded(rng, rng.choice(wordings), view, x=name)
    return Turn(question, said_of(name, PLACES[item.place]), name, item)


def _region(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    region = rng.choice(list(REGIONS))
    found = [item for item in picture.items if item.place in REGIONS[region]]
    if len(found) > 1 or (not found and rng.random() < 0.7):
        return None
    names = region.split("|")
    answer = said_of(names[0], named(found[0]) if found else "nothing")
    question = worded(rng, rng.choice(wordings), view, x=rng.choice(names))
    return Turn(question, answer, names[0], found[0] if found else None)


def _counting(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """A question that counts items. None for pictures with a number, which could be counted as an
    item."""
    if picture.number:
        return None
    noun = any_noun(rng, [picture])
    words = noun_words(rng, noun)
    places = [PLACES[item.place] for item in picture.shapes if fits(item, noun)]
    kind = plural(answer_words(noun))
    answer = f"There are no {kind}."
    if places:
        total = f"there {'are' if places[1:] else 'is'} {len(places)}"
        answer = f"{_capital(kind)}: {_listed(places)}, so {total}."
    question = worded(rng, rng.choice(wordings), view, x=plural(words))
    return Turn(question, answer, " ".join(filter(None, noun)))


def _number(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    item = picture.number
    if item is None:
        return None
    question = worded(rng, rng.choice(wordings), view)
    return Turn(question, f"The number is {item.shape}.", "the number", item)


def _description(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """A question whose answer lists the items in reading order, each after its place."""
    items = picture.items
    words = _listed([f"{PLACES[item.place]} is {named(item)}" for item in items])
    answer = f"{_capital(words)}."
    about = items[0] if len(items) == 1 else None
    return Turn(worded(rng, rng.choice(wordings), view), answer, "all", about)


def _existence(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """A yes-or-no question. Half of the answers are no, many of them for a colour and a kind that
    occur separately."""
    noun = any_noun(rng, [picture])
    if rng.random() < 0.4 and picture.shapes:
        noun = rng.choice(picture.shapes).colour, rng.choice(picture.shapes).shape
    if noun == (None, None) or (noun[1] is None and picture.number):
        return None
    words, count = answer_words(noun), sum(fits(item, noun) for item in picture.shapes)
    if count > 1 and rng.random() < 0.5:
        return None
    answer = f"Yes, there is {_a(words)}." if count else f"No, there is no {words}."
    question = worded(rng, rng.choice(wordings), view, x=_a(noun_words(rng, noun)))
    return Turn(question, answer, words)


def _truth(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    picked = _pick(rng, unique_names(picture, by="shape"))
    if picked is None:
        return None
    name, item = picked
    chosen = rng.choice((item.colour, rng.choice(list(COLOURS)), rng.choice(picture.items).colour))
    answer = said_of(name, f"{item.colour}, so {'yes' if chosen == item.colour else 'no'}")
    question = worded(rng, rng.choice(wordings), view, x=name, c=chosen)
    return Turn(question, answer, name, item)


def _relation(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    """A question about the relation of two items whose kinds (or looks) are unique, along an axis
    on which they differ."""
    names = unique_names(picture, by=rng.choice(("shape", "looks")))
    names = {name: item for name, item in names.items() if name not in ("the shape", "the object")}
    if len(names) < 2:
        return None
    (name, item), (other_name, other) = rng.sample(list(names.items()), 2)
    chosen = rng.choice(list(DIRECTIONS))
    along = "column" if chosen in ("left of", "right of") else "row"
    before, after = (getattr(each, along) for each in (item, other))
    if before == after:
        return None
    true = (before < after) == (chosen in ("left of", "above"))
    places = f"{PLACES[item.place]}, {other_name} is {PLACES[other.place]}"
    answer = said_of(name, f"{places}, so {'yes' if true else 'no'}")
    asked = rng.choice(DIRECTIONS[chosen].split("|"))
    question = worded(rng, rng.choice(wordings), view, x=name, y=other_name, r=asked)
    return Turn(question, answer, name, item)


def _background(rng: Random, picture: Picture, view: View, wordings: Sequence[str]) -> Turn | None:
    answer = f"The background is {'light' if picture.background.light else 'dark'}."
    return Turn(worded(rng, rng.choice(wordings), view), answer, "background")


# Skills about one picture, with their wordings.
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
