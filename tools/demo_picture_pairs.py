"""Two pictures in one conversation: which has more, and what has changed."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tools.demo_picture_questions import (
    THIS,
    Turn,
    any_noun,
    count_of,
    counted,
    in_words,
    named,
    noun_words,
    plural,
    worded,
)
from tools.demo_pictures import (
    PLACES,
    SHAPES,
    Item,
    Picture,
    invent,
    is_reserved,
    make_item,
    visible,
)

Pair = tuple[list[Picture], Turn]
Altered = tuple[list[Item], str]
Change = Callable[[Random, Picture], Altered | None]

MORE = (
    "Which picture has {more} {x}?|Which picture shows {more} {x}?|Which image has {more} {x}?|"
    "Where are {more} {x}, in the first or in the second picture?|"
    "In which picture are there {more} {x}?|Which of the two pictures has {more} {x}?|"
    "Does the first or the second picture have {more} {x}?|In which image do you see {more} {x}?"
).split("|")
WHICH = (
    "Which picture has {x}?|Which picture shows {x}?|In which picture is {x}?|Which image has {x}?|"
    "Is {x} in the first or in the second picture?|In which picture do you see {x}?|"
    "Which of the two pictures has {x}?|In which image can you see {x}?"
).split("|")
TOGETHER = (
    "How many {x} are there in both pictures together?|How many {x} have both pictures together?|"
    "Count the {x} of both pictures.|How many {x} are there in all?|How many {x} in total?|"
    "What is the number of {x} in both pictures together?"
).split("|")
LARGER = (
    "Which number is {larger}?|Which of the two numbers is {larger}?|What is the {larger} number?|"
    "Tell me the {larger} number.|Which is the {larger} number?|Read me the {larger} number."
).split("|")
CHANGED = (
    "What is different?|What has changed?|What changed?|Find the difference.|Spot the difference.|"
    "What is the difference between the two pictures?|What is different in the second picture?|"
    "What changed from the first picture to the second?|Compare the two pictures.|"
    "Which difference do you see?|What has changed in the second picture?|Do you see a difference?|"
    "What is not the same?|How do the pictures differ?|What has changed between the pictures?"
).split("|")


def compared(rng: Random, *, held: bool) -> Pair | None:
    """Two pictures of their own, and a question that needs both."""
    compare = rng.choice((_more, _more, _which, _together, _larger))
    numbers = compare is _larger
    shapes = 0 if numbers else None
    pictures = [invent(rng, held=held, shapes=shapes, number=numbers) for _ in range(2)]
    turn = in_words(lambda: compare(rng, pictures), held=held)
    return turn and (pictures, turn)


def changed(rng: Random, *, held: bool) -> Pair | None:
    """A picture, the same with at most one change, and the question what that is.

    The change is chosen first: some are rarely possible, and would else be rarely asked about.
    """
    change = rng.choice((_recoloured, _reshaped, _moved, _added, _removed, _same))
    number = rng.random() < 0.15
    while (altered := _altered(rng, change, number=number, held=held)) is None:
        pass
    pictures, answer = altered
    turn = in_words(lambda: Turn(worded(rng, rng.choice(CHANGED), THIS[0]), answer), held=held)
    return turn and (pictures, turn)


def _altered(
    rng: Random, change: Change, *, number: bool, held: bool
) -> tuple[list[Picture], str] | None:
    first = invent(rng, held=held, shapes=rng.choice((1, 2, 2, 3)), number=number)
    if change in (_moved, _added):
        first = _crowded(rng, first)
    altered = change(rng, first)
    if altered is None:
        return None
    items = tuple(sorted(altered[0], key=lambda item: item.place))
    background = replace(first.background, seed=rng.getrandbits(32))
    pictures = [first, Picture(items, background)]
    fits = all(is_reserved(*item.facts) == held for item in items)
    return (pictures, altered[1]) if fits and not any(map(_ambiguous, pictures)) else None


def _more(rng: Random, pictures: list[Picture]) -> Turn | None:
    noun, more = any_noun(rng, pictures), rng.choice(("more", "more", "fewer"))
    first, second = (count_of(picture, noun) for picture in pictures)
    if first == second == 0:
        return None
    if first == second:
        answer = f"Both pictures have {counted(first, noun)}."
    else:
        which = "first" if (first > second) == (more == "more") else "second"
        answer = f"The {which} picture has {more} {counted(2, noun).removeprefix('2 ')}."
    words = plural(noun_words(rng, noun))
    return Turn(worded(rng, rng.choice(MORE), THIS[0], more=more, x=words), answer)


def _which(rng: Random, pictures: list[Picture]) -> Turn | None:
    item = rng.choice([item for picture in pictures for item in picture.items])
    noun = rng.choice((item.colour, None)), item.shape
    first, second = (count_of(picture, noun) > 0 for picture in pictures)
    if first == second:
        return None
    words = counted(1, noun).replace("1", "an" if noun[0] == "orange" else "a")
    answer = f"The {'first' if first else 'second'} picture has {words}."
    return Turn(worded(rng, rng.choice(WHICH), THIS[0], x=words), answer)


def _together(rng: Random, pictures: list[Picture]) -> Turn | None:
    noun = any_noun(rng, pictures)
    count = sum(count_of(picture, noun) for picture in pictures)
    answer = f"There {'is' if count == 1 else 'are'} {counted(count, noun)}."
    words = plural(noun_words(rng, noun))
    return Turn(worded(rng, rng.choice(TOGETHER), THIS[0], x=words), answer)


def _larger(rng: Random, pictures: list[Picture]) -> Turn | None:
    numbers = sorted(int(item.shape) for picture in pictures for item in picture.items)
    if numbers[0] == numbers[1]:
        return None
    larger = rng.choice(("larger", "bigger", "smaller"))
    answer = f"The number is {numbers[0 if larger == 'smaller' else 1]}."
    return Turn(worded(rng, rng.choice(LARGER), THIS[0], larger=larger), answer)


def _ambiguous(picture: Picture) -> bool:
    """Whether two items look the same, so that nobody could say which of them has changed."""
    return len({item.looks for item in picture.items}) < len(picture.items)


def _crowded(rng: Random, picture: Picture) -> Picture:
    """The same facts, with room for one more item in every other place."""
    return replace(
        picture, items=tuple(make_item(rng, *item.facts, space="crowded") for item in picture.items)
    )


def _recoloured(rng: Random, picture: Picture) -> Altered | None:
    item, others = _one_of(rng, picture)
    colour = rng.choice(visible(picture.background))
    if colour == item.colour:
        return None
    shade = make_item(rng, colour, item.shape, item.place, space="crowded").shade
    altered = replace(item, colour=colour, shade=shade)
    return [*others, altered], f"The {_called(item)} is {colour} now."


def _reshaped(rng: Random, picture: Picture) -> Altered | None:
    item, others = _one_of(rng, picture)
    shape = str(rng.randint(0, 99)) if item.is_number else rng.choice(SHAPES)
    if shape == item.shape:
        return None
    turn = make_item(rng, item.colour, shape, item.place, space="crowded").turn
    answer = f"The {_called(item)} is {shape if item.is_number else f'a {shape}'} now."
    return [*others, replace(item, shape=shape, turn=turn)], answer


def _moved(rng: Random, picture: Picture) -> Altered | None:
    item, others = _one_of(rng, picture)
    place = _free_place(rng, picture)
    right, down = (place % 3 - item.column) / 3, (place // 3 - item.row) / 3
    altered = replace(item, place=place, x=item.x + right, y=item.y + down)
    return [*others, altered], f"The {_called(item)} is {PLACES[place]} now."


def _added(rng: Random, picture: Picture) -> Altered | None:
    colour, shape = rng.choice(visible(picture.background)), rng.choice(SHAPES)
    item = make_item(rng, colour, shape, _free_place(rng, picture), space="crowded")
    answer = named(item)
    return [*picture.items, item], f"{answer[0].upper()}{answer[1:]} is new."


def _removed(rng: Random, picture: Picture) -> Altered | None:
    item, others = _one_of(rng, picture)
    return (others, f"The {_called(item)} is gone.") if others else None


def _same(rng: Random, picture: Picture) -> Altered | None:
    return list(picture.items), "Nothing is different."


def _one_of(rng: Random, picture: Picture) -> tuple[Item, list[Item]]:
    item = rng.choice(picture.items)
    return item, [other for other in picture.items if other is not item]


def _free_place(rng: Random, picture: Picture) -> int:
    taken = {item.place for item in picture.items}
    return rng.choice([place for place in range(len(PLACES)) if place not in taken])


def _called(item: Item) -> str:
    return "number" if item.is_number else " ".join(item.looks)
