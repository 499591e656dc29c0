"""Dialogues about pictures for training the demo model, and held-out questions.

Both the sentence of a held-out question and every item of its pictures are reserved (see
`demo_picture_questions` and `demo_pictures`), whatever the seed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NotRequired, TypedDict

from tools import demo_dialogues
from tools.demo_picture_questions import (
    FIRST,
    SECOND,
    SKILLS,
    THIS,
    Turn,
    View,
    in_words,
    said_of_it,
    worded,
)
from tools.demo_picture_wordings import ABOUT_IT, ELLIPSES
from tools.demo_pictures import COLOURS, SHAPES, Picture, invent, png

Dialogue = tuple[list["Message"], str]

NO_PICTURE = "I see no picture. Please send me one."
# The words of an answer that must be right; all others may differ.
FACT_WORDS = {
    *COLOURS,
    *SHAPES,
    *"yes no nothing light dark".split(),
    *"left right top bottom middle above below".split(),
}
# The share of training dialogues with text before images, as OpenAI's clients send them; Ollama's
# protocol puts images first.
TEXT_FIRST_SHARE = 0.5
COUNT_WORDS = "zero one two three four five six seven eight nine ten".split()


class Message(TypedDict):
    """A turn. Its pictures precede its text, or follow it if `text_first`."""

    role: str
    content: str
    pictures: NotRequired[list[Picture]]
    text_first: NotRequired[bool]


@dataclass(frozen=True, slots=True)
class PictureQuestion:
    """A conversation that ends with a question of the user, and its only right reply."""

    skill: str
    messages: list[Message]
    answer: str


def held_out(seed: int = 0, *, per_skill: int = 60) -> list[PictureQuestion]:
    """Held-out questions about held-out pictures, alone or after other turns."""
    rng = Random(f"held out pictures {seed}")
    return [_question(rng, skill, held=True) for skill in SHARE for _ in range(per_skill)]


def training_dialogues(seed: int | str) -> Iterator[list[Message]]:
    """An infinite iterator of dialogues of one to four turns about pictures and other topics."""
    rng = Random(f"training pictures {seed}")
    texts = demo_dialogues.training_dialogues(rng.getrandbits(32))
    while True:
        skill = rng.choices(list(SHARE), weights=list(SHARE.values()))[0]
        question = _question(rng, skill, held=False)
        messages = [*question.messages, _reply(question.answer)]
        if rng.random() < TEXT_FIRST_SHARE:
            messages = with_text_first(messages)
        if rng.random() < 0.15:
            text = [
                Message(role=turn["role"], content=turn["content"])
                for turn in next(texts)
                if turn["role"] != "system"
            ]
            messages = text + messages if rng.random() < 0.5 else messages + text
        system = rng.choice(demo_dialogues.SYSTEM_MESSAGES)
        yield [Message(role="system", content=system)] * (rng.random() < 0.2) + messages


def with_text_first(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with each turn's pictures after its text."""
    return [
        Message(**message, text_first=True) if "pictures" in message else message
        for message in messages
    ]


def is_right(answer: str, given: str) -> bool:
    """Whether `given` has the same facts as `answer` in the same order; other words are ignored."""
    return facts(answer) == facts(given)


def facts(answer: str) -> list[str]:
    words = re.findall(r"[a-z]+|[0-9]+", answer.casefold())
    singular = (word if word in FACT_WORDS else re.sub("(?<=ss)es$|s$", "", word) for word in words)
    digits = (str(COUNT_WORDS.index(word)) if word in COUNT_WORDS else word for word in singular)
    return [word for word in digits if word in FACT_WORDS or word.isdigit()]


def as_requests(messages: list[Message], *, size: int) -> list[dict[str, Any]]:
    """The messages as `/api/chat` takes them: each picture as PNG bytes with sides of `size`
    pixels.

    `[img]` marks a picture that does not come first.
    """
    requests = []
    for message in messages:
        request: dict[str, Any] = {"role": message["role"], "content": message["content"]}
        if "pictures" in message:
            if message.get("text_first"):
                request["content"] += "[img]" * len(message["pictures"])
            request["images"] = [png(picture, size) for picture in message["pictures"]]
        requests.append(request)
    return requests


def _question(rng: Random, skill: str, *, held: bool) -> PictureQuestion:
    """Draws pictures until the skill can ask about one."""
    make = CONVERSATIONS.get(skill, _about_one)
    while True:
        exchange = make(rng, skill, held)
        if exchange is not None:
            messages, answer = exchange
            return PictureQuestion(skill, messages, answer)


def _about_one(rng: Random, skill: str, held: bool) -> Dialogue | None:
    picture = _invent_for(rng, skill, held)
    before = _context(rng, picture, held)
    turn = _turn(rng, skill, picture, THIS, held)
    if turn is None:
        return None
    return _dialogue([picture], [*before, turn])


def _context(rng: Random, picture: Picture, held: bool) -> list[Turn]:
    """Up to four earlier turns in sentences of the training split; more of them in training."""
    turns = rng.choice((0, 0, 1, 2, 3) if held else (0, 1, 2, 3, 4))
    skills = rng.choices(list(SKILLS), weights=[SHARE[skill] for skill in SKILLS], k=turns)
    asked = (_turn(rng, skill, picture, THIS, held=False) for skill in skills)
    return [turn for turn in asked if turn is not None]


def _follow_up(rng: Random, skill: str, held: bool) -> Dialogue | None:
    """A question that depends on the previous one."""
    earlier = rng.choice(list(SKILLS))
    picture = _invent_for(rng, earlier, held)
    before = _turn(rng, earlier, picture, THIS, held=False)
    if before is None:
        return None
    ask = _elliptic_turn if earlier in ELLIPSES and rng.random() < 0.5 else _turn_about_it
    turn = ask(rng, earlier, picture, before, held)
    return turn and _dialogue([picture], [*_context(rng, picture, held), before, turn])


def _elliptic_turn(
    rng: Random, skill: str, picture: Picture, before: Turn, held: bool
) -> Turn | None:
    ask = SKILLS[skill][0]
    turn = in_words(lambda: ask(rng, picture, THIS[0], ELLIPSES[skill]), held=held)
    return None if turn is None or turn.subject == before.subject else turn


def _turn_about_it(
    rng: Random, skill: str, picture: Picture, before: Turn, held: bool
) -> Turn | None:
    item = before.about
    asked = rng.choice([kind for kind in ABOUT_IT if kind != skill])
    if item is None or (item.is_number and asked == "shape"):
        return None
    answer = said_of_it(asked, item)
    wordings = ABOUT_IT[asked]
    return in_words(lambda: Turn(worded(rng, rng.choice(wordings), THIS[0]), answer), held=held)


def _about_none(rng: Random, skill: str, held: bool) -> Dialogue | None:
    """A question about a missing picture."""
    asked = rng.choice(list(SKILLS))
    turn = _turn(rng, asked, _invent_for(rng, asked, held), THIS, held)
    return turn and ([Message(role="user", content=turn.question)], NO_PICTURE)


def _about_one_of_two(rng: Random, skill: str, held: bool) -> Dialogue | None:
    asked = rng.choice(list(SKILLS))
    pictures = [_invent_for(rng, asked, held) for _ in range(2)]
    index = rng.randrange(2)
    turn = _turn(rng, asked, pictures[index], (FIRST, SECOND)[index], held)
    return turn and _dialogue_about_two(rng, pictures, turn, held)


def _invent_for(rng: Random, skill: str, held: bool) -> Picture:
    """A picture that the skill can usually ask about."""
    if skill == "number":
        return invent(rng, held=held, shapes=rng.choice((0, 0, 0, 1, 2)), number=True)
    if skill == "shape" and rng.random() < 0.4:
        return invent(rng, held=held, shapes=1)
    if skill == "description":
        number = rng.random() < 0.35
        return invent(rng, held=held, shapes=rng.choice((1, 1, 2, 3, 4)) - number, number=number)
    return invent(rng, held=held, number=skill != "counting" and rng.random() < 0.2)


def _turn(
    rng: Random, skill: str, picture: Picture, views: Sequence[View], held: bool
) -> Turn | None:
    ask, wordings = SKILLS[skill]
    return in_words(lambda: ask(rng, picture, rng.choice(views), wordings), held=held)


def _dialogue(pictures: list[Picture], turns: list[Turn]) -> Dialogue:
    """A dialogue whose first question has the pictures, and its last answer."""
    messages: list[Message] = []
    for turn in turns:
        messages += [Message(role="user", content=turn.question), _reply(turn.answer)]
    messages[0]["pictures"] = pictures
    return messages[:-1], turns[-1].answer


def _dialogue_about_two(rng: Random, pictures: list[Picture], turn: Turn, held: bool) -> Dialogue:
    """A dialogue with both pictures at once or, after questions about the first one, one by one."""
    first, second = pictures
    before = _context(rng, first, held)
    if not before or rng.random() < 0.5:
        return _dialogue(pictures, [turn])
    messages, answer = _dialogue([first], [*before, turn])
    messages[-1]["pictures"] = [second]
    return messages, answer


def _reply(answer: str) -> Message:
    return Message(role="assistant", content=answer)


# Skills other than simple questions about one picture.
CONVERSATIONS: dict[str, Callable[[Random, str, bool], Dialogue | None]] = {
    "follow-up": _follow_up,
    "one of two": _about_one_of_two,
    "no picture": _about_none,
}
# In the order in which results are reported; harder skills get more of the dialogues.
SHARE = dict(
    zip(
        (*SKILLS, *CONVERSATIONS),
        (4, 4, 5, 4, 16, 14, 10, 12, 6, 10, 1, 10, 16, 2),
        strict=True,
    )
)
