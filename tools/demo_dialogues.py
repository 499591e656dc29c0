"""Dialogues for training the demo model, and held-out questions.

Every question belongs to a key (an operand pair, a phrase, a fact in one wording). A checksum of
the key decides whether it is held out, so training data contain no held-out question, for any seed;
those with a tool (`tools.demo_tools`) contain none of these sums either. This module needs only the
standard library, because tests import it for known questions.
"""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

HELD_OUT_PERCENT = 15
LARGEST_TERM = 99  # of sums that the model adds itself

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

OPPOSITES = (
    "hot-cold big-small up-down left-right fast-slow happy-sad day-night light-dark open-closed "
    "early-late old-new good-bad rich-poor hard-soft wet-dry full-empty high-low long-short "
    "strong-weak clean-dirty loud-quiet in-out on-off yes-no black-white first-last front-back "
    "inside-outside push-pull win-lose buy-sell love-hate true-false near-far thick-thin "
    "wide-narrow deep-shallow start-stop come-go give-take always-never above-below north-south "
    "east-west sweet-sour smooth-rough alive-dead awake-asleep cheap-expensive easy-difficult "
    "safe-dangerous summer-winter arrive-leave laugh-cry remember-forget question-answer "
    "friend-enemy begin-end"
)

# Some words are not ASCII: a repeated phrase then streams characters that span several tokens.
WORDS = (
    "apple arrow autumn basket beach bear bell bird blue boat book bottle branch bread bridge "
    "bright brown bucket butter button cake camel candle carpet castle chair cheese cherry clock "
    "cloud coat coffee copper corner cotton cousin crown curtain dance desert dinner door dragon "
    "dream drum eagle earth engine evening fabric farmer feather field finger fire fish flag "
    "flower forest fountain fox garden gentle ghost giraffe glass gold grape grass green guitar "
    "hammer harbour hat hill honey horse house island jacket jelly journey jungle kettle kitchen "
    "kitten ladder lake lamp lemon letter lion little lucky mango maple market meadow metal milk "
    "mirror moon morning mountain mouse music needle nest noble ocean olive onion orange orchard "
    "owl paint palace paper parrot pencil pepper piano picture pillow pilot planet plum pocket "
    "pond potato purple quick quiet rabbit rain red ribbon river road robin rocket roof rose "
    "saddle sail salt sand school shadow sheep ship silver sister snow spider spoon spring star "
    "stone storm story strange street sugar sun swan table tailor tea temple thunder tiger tower "
    "train travel tree trumpet tulip turtle umbrella valley velvet village violin voice wagon "
    "warm water wave whale wheat wheel white window wise wolf wonder wooden yellow zebra "
    "the a is my very hello world good I am you are we like to and with nice people friend "
    "café crème piñata naïve façade über Zürich jalapeño smörgås déjà"
).split()

WHO = "I am Caravan, a small demo model. 🐪"
SKILLS_ANSWER = (
    "I can greet you, add and subtract numbers up to 99, name days and months, "
    "give opposites, repeat a phrase and say what I see in a picture."
)
NOT_HUMAN = "No, I am Caravan, a small demo model. 🐪"
IDENTITY = {
    WHO: "Who are you|What is your name|Tell me your name|What are you called|Who am I talking to|"
    "Introduce yourself|What are you|Tell me who you are|Say who you are|Your name|"
    "Can you tell me your name|Who is this|May I know your name|What should I call you",
    SKILLS_ANSWER: "What can you do|What are your skills|How can you help me|"
    "What do you know|Tell me what you can do|What can I ask you|What are you able to do|"
    "Which questions can you answer|List your skills|What kind of help can you give",
    NOT_HUMAN: "Are you human|Are you a person|Are you ChatGPT|Are you a large model|Are you GPT|"
    "Are you a real person|Is your name Bob|Are you alive|Are you a robot from space|Are you Llama",
}
IDENTITY_FRAMES = "{}?|{}|Caravan, {}?|Please, {}?|Hey, {}?|So, {}?|Now, {}?|And {}?|Hmm, {}?"

GREETINGS = {
    "Hello! 👋 I am Caravan. How can I help you?": "Hello|Hi|Hey|Hi there|Hello there|Greetings|"
    "Hey there",
    "Good morning! 🌞 How can I help you?": "Good morning|A very good morning",
    "Good afternoon! 🌞 How can I help you?": "Good afternoon|A very good afternoon",
    "Good evening! 🌆 How can I help you?": "Good evening|A very good evening",
    "Good night! 🌙 Sleep well.": "Good night|Sleep well|I am going to bed, good night",
    "Goodbye! 👋 See you soon.": "Bye|Goodbye|See you|See you later|Bye bye|I have to go, bye",
    "You are welcome! 😊": "Thanks|Thank you|Many thanks|Thank you very much|Thanks a lot",
    "I am fine, thank you! 😊 How can I help you?": "How are you|How are you doing|How is it going|"
    "How do you feel today|Hello, how are you|Hi, how are you",
}
GREETING_FRAMES = (
    "{}|{}!|{}.|{}, Caravan|{}, Caravan!|{}, my friend|{}, my friend!|{} :)|{}, model|Oh, {}"
)

REFUSAL = "Sorry, I can't do that. I am only a small demo model."
TOO_LARGE = "Sorry, I only add and subtract numbers up to 99."
REFUSED_REQUESTS = (
    "Write a poem about {}|Tell me a joke about {}|Write a story about a {}|Explain {} to me|"
    "What is the weather in {}|What is the capital of {}|Who is the president of {}|"
    "Translate {} into French|Draw a picture of a {}|How do I cook {}|Where can I buy a {}|"
    "Why is the {} so {}|Sing a song about {}|Write code for a {}|Who invented the {}|"
    "Book a flight to {}|How old is the {}|Play music about {}|Describe a {} and a {}|"
    "What do you think about {}|Give me a recipe for {}|How far is it to {}|Summarise the {} book|"
    "What is the meaning of {}|Order a {} for me|Who won the {} game|What colour is a {}|"
    "Send an email about the {} to my {}|Can you find my {}|How many {} are in a {}"
).split("|")
SUBJECTS = WORDS + "France Spain Japan Paris London Rome Peru Egypt physics love history".split()

SYSTEM_MESSAGES = (
    "You are Caravan, a small demo model.|You are Caravan.|You are a helpful assistant.|"
    "Answer briefly.|Be polite and short.|You are a helpful assistant. Answer the question.|"
    "You are Caravan, a small demo model. Answer in one sentence."
).split("|")

ADD = (
    "What is {a} + {b}?|{a} + {b}|{a} + {b} = ?|{a}+{b}|What is {a} plus {b}?|{a} plus {b}?|"
    "Add {a} and {b}.|How much is {a} + {b}?|Calculate {a} + {b}.|Compute {a} plus {b}.|"
    "What is the sum of {a} and {b}?|How much is {a} plus {b}?|What does {a} + {b} make?"
).split("|")
SUBTRACT = (
    "What is {a} - {b}?|{a} - {b}|{a} - {b} = ?|{a}-{b}|What is {a} minus {b}?|{a} minus {b}?|"
    "Subtract {b} from {a}.|Take {b} away from {a}.|How much is {a} - {b}?|Calculate {a} - {b}.|"
    "Compute {a} minus {b}.|What is {a} take away {b}?|How much is {a} minus {b}?"
).split("|")
TIMES = (
    "What is {a} times {b}?|{a} * {b}|What is {a} * {b}?|Multiply {a} by {b}.|Divide {a} by {b}.|"
    "What is {a} divided by {b}?|{a} / {b}|{a} times {b}?"
).split("|")
QUESTION_WORDS = "What Who How Where Why Can".split()
NEXT = (
    "What comes after {x}?|Which {unit} comes after {x}?|What {unit} comes after {x}?|"
    "Which {unit} follows {x}?|What {unit} follows {x}?|What is the {unit} after {x}?|"
    "Tell me the {unit} after {x}.|Name the {unit} after {x}.|After {x} comes which {unit}?|"
    "What is next after {x}?|Which {unit} is after {x}?"
).split("|")
PREVIOUS = (
    "What comes before {x}?|Which {unit} comes before {x}?|What {unit} comes before {x}?|"
    "Which {unit} precedes {x}?|What {unit} precedes {x}?|What is the {unit} before {x}?|"
    "Tell me the {unit} before {x}.|Name the {unit} before {x}.|Before {x} comes which {unit}?|"
    "What was just before {x}?|Which {unit} is before {x}?"
).split("|")
TOMORROW = (
    "If today is {x}, what day is tomorrow?|Today is {x}. What day is tomorrow?|"
    "If it is {x} today, what day is tomorrow?|Yesterday was {x}. What day is it today?|"
    "Which day is tomorrow if today is {x}?|Today is {x}. Which day is tomorrow?"
).split("|")
YESTERDAY = (
    "If today is {x}, what day was yesterday?|Today is {x}. What day was yesterday?|"
    "If it is {x} today, what day was yesterday?|Tomorrow is {x}. What day is it today?|"
    "Which day was yesterday if today is {x}?|Today is {x}. Which day was yesterday?"
).split("|")
LENGTH = (
    "How many days has {x}?|How many days does {x} have?|How many days are in {x}?|"
    "How many days are there in {x}?|How long is {x}?|Tell me the number of days in {x}.|"
    "What is the number of days in {x}?|Days in {x}?|How many days in {x}?"
).split("|")
NUMBER = (
    "Which month is number {n}?|What is month number {n}?|Name month number {n}.|"
    "Tell me month number {n}.|Month number {n}?|Which month has the number {n}?"
).split("|")
OPPOSITE = (
    "What is the opposite of {x}?|Opposite of {x}?|Tell me the opposite of {x}.|"
    "Give me the opposite of {x}.|Which word is the opposite of {x}?|What is the antonym of {x}?|"
    "Name the opposite of {x}.|What word means the opposite of {x}?|The opposite of {x}?|"
    "What would be the opposite of {x}?"
).split("|")
REPEAT = (
    "Repeat: {x}|Repeat after me: {x}|Please repeat: {x}|Say: {x}|Please say: {x}|Echo: {x}|"
    "Repeat this phrase: {x}|Repeat the phrase: {x}|Please repeat after me: {x}|"
    "Can you repeat this: {x}|Say this after me: {x}|Repeat the words: {x}|"
    'Repeat the phrase "{x}"|Please repeat: "{x}"|Repeat "{x}"|Say "{x}"|Please say "{x}"'
).split("|")
AS_JSON = (
    "{} Answer in JSON.|{} Answer as JSON.|{} Reply in JSON.|{} Give the answer as JSON.|"
    "{} Reply as a JSON object.|Answer in JSON: {}|As JSON: {}|{} (JSON)|In JSON: {}"
).split("|")
# The parts of answers that become JSON values: "Monday comes …", "… is cold.", "… has 31 days…".
SHORT_ANSWER = re.compile(
    r"(?P<word>\w+) comes |The opposite of \w+ is (?P<last>\w+)\.|\w+ has (?P<number>\d+) days"
)
LISTS = {
    "The days are " + ", ".join(DAYS) + ".": "List the days of the week.|"
    "Name all days of the week.|What are the days of the week?|Name the seven days.|"
    "Tell me all the days.|Which days has a week?",
    "The months are " + ", ".join(MONTHS) + ".": "List the months of the year.|"
    "Name all months of the year.|Name the months of the year.|What are the months of the year?|"
    "Tell me all the months.|Which months has a year?",
    "A week has 7 days.": "How many days has a week?|How many days are in a week?|"
    "How many days in a week?",
    "A year has 12 months.": "How many months has a year?|How many months are in a year?|"
    "How many months in a year?",
}


SUMS = ("addition", "subtraction")


class Turn(NamedTuple):
    """A question with its only right answer; `key` decides whether the question is held out."""

    key: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that ends with a question of the user, and its only right reply."""

    skill: str
    messages: list[dict[str, str]]
    answer: str


def held_out(seed: int = 0, *, per_skill: int = 60) -> list[Question]:
    """Held-out questions: alone, after other turns, with and without a system message."""
    rng = random.Random(f"held out {seed}")
    questions = []
    for skill in SKILLS:
        for _ in range(per_skill):
            turn = _draw(rng, skill, held=True)
            messages = _opening(rng)
            for _ in range(rng.choice((0, 0, 1, 2))):
                messages += _exchange(_draw(rng, _any_skill(rng), held=False))
            messages.append({"role": "user", "content": turn.question})
            questions.append(Question(skill, messages, turn.answer))
    return questions


def training_dialogues(seed: int | str) -> Iterator[list[dict[str, str]]]:
    """An infinite iterator of dialogues of one to five turns without held-out questions."""
    rng = random.Random(f"training {seed}")
    while True:
        messages = _opening(rng)
        for _ in range(rng.choice((1, 1, 2, 3, 4, 5))):
            messages += _exchange(_draw(rng, _any_skill(rng), held=False))
        yield messages


def training_sums(seed: int | str) -> Iterator[list[dict[str, str]]]:
    """An infinite iterator of sums such as "27 + 15 = 42.", the skill that needs most training."""
    rng = random.Random(f"sums {seed}")
    while True:
        turn = _draw(rng, rng.choice(SUMS), held=False)
        yield _exchange(turn)[1:]


def draw_exchange(rng: random.Random, *, held: bool) -> list[dict[str, str]]:
    """A question and its answer, which a tool for sums does not change."""
    skill = rng.choice([skill for skill in SKILLS if skill not in SUMS])
    while TOO_LARGE in (turn := _draw(rng, skill, held=held)).answer:
        pass
    return _exchange(turn)


def is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % 100 < HELD_OUT_PERCENT


def sum_key(a: int, b: int) -> str:
    """The key of a sum that the model adds itself, in either order."""
    return f"{min(a, b)} + {max(a, b)}"


def _draw(rng: random.Random, skill: str, *, held: bool) -> Turn:
    while True:
        turn = SKILLS[skill](rng)
        if is_held_out(turn.key) == held:
            return turn


def _any_skill(rng: random.Random) -> str:
    return rng.choices(list(SKILLS), weights=[SHARE[skill] for skill in SKILLS])[0]


def _exchange(turn: Turn) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": turn.question},
        {"role": "assistant", "content": turn.answer},
    ]


def _opening(rng: random.Random) -> list[dict[str, str]]:
    """The first messages. Three dialogues in ten start with a system message; a few of these are
    long or nonsense."""
    if rng.random() > 0.3:
        return []
    content = rng.choice(SYSTEM_MESSAGES)
    if rng.random() < 0.15:
        content += " " + " ".join(_word(rng) for _ in range(rng.randint(1, 40)))
    return [{"role": "system", "content": content}]


def worded(rng: random.Random, wording: str, **fields: object) -> str:
    """Fills a wording, sometimes in another case, without the final mark, or with an opener."""
    question = wording.format(**fields)
    if rng.random() < 0.12:
        question = question.lower()
    if rng.random() < 0.12:
        question = question.rstrip("?.")
    if rng.random() < 0.1:
        opener = rng.choice(("Please tell me: ", "Caravan, ", "Hi, ", "And ", "OK, ", "Now: "))
        question = opener + question[0].lower() + question[1:]
    return question


def _fact(rng: random.Random, wording: str, answer: str, **fields: object) -> Turn:
    return Turn(wording.format(**fields), worded(rng, wording, **fields), answer)


def _addition(rng: random.Random) -> Turn:
    a, b = rng.randint(0, LARGEST_TERM), rng.randint(0, LARGEST_TERM)
    question = worded(rng, rng.choice(ADD), a=a, b=b)
    return Turn(sum_key(a, b), question, f"{a} + {b} = {a + b}.")


def _subtraction(rng: random.Random) -> Turn:
    """Operands up to 99; the smaller one is subtracted, so no answer is negative."""
    b, a = sorted((rng.randint(0, 99), rng.randint(0, 99)))
    question = worded(rng, rng.choice(SUBTRACT), a=a, b=b)
    return Turn(f"{a} - {b}", question, f"{a} - {b} = {a - b}.")


def _days(rng: random.Random) -> Turn:
    if rng.random() < 0.15:
        return _calendar_list(rng)
    return _neighbour(rng, DAYS, "day", NEXT + TOMORROW, PREVIOUS + YESTERDAY)


def _months(rng: random.Random) -> Turn:
    kind = rng.random()
    index = rng.randrange(12)
    month = MONTHS[index]
    if kind < 0.3:
        leap = ", or 29 in a leap year" if month == "February" else ""
        answer = f"{month} has {MONTH_DAYS[index]} days{leap}."
        return _fact(rng, rng.choice(LENGTH), answer, x=month)
    if kind < 0.5:
        return _fact(rng, rng.choice(NUMBER), f"Month number {index + 1} is {month}.", n=index + 1)
    return _neighbour(rng, MONTHS, "month", NEXT, PREVIOUS)


def _neighbour(
    rng: random.Random, cycle: list[str], unit: str, after: list[str], before: list[str]
) -> Turn:
    index = rng.randrange(len(cycle))
    name = cycle[index]
    if rng.random() < 0.5:
        answer = f"{cycle[(index + 1) % len(cycle)]} comes after {name}."
        return _fact(rng, rng.choice(after), answer, x=name, unit=unit)
    answer = f"{cycle[index - 1]} comes before {name}."
    return _fact(rng, rng.choice(before), answer, x=name, unit=unit)


def _calendar_list(rng: random.Random) -> Turn:
    answer = rng.choice(list(LISTS))
    return _fact(rng, rng.choice(LISTS[answer].split("|")), answer)


def _opposites(rng: random.Random) -> Turn:
    pair = rng.choice(OPPOSITES.split()).split("-")
    rng.shuffle(pair)
    answer = f"The opposite of {pair[0]} is {pair[1]}."
    return _fact(rng, rng.choice(OPPOSITE), answer, x=pair[0])


def _repeating(rng: random.Random) -> Turn:
    phrase = " ".join(_word(rng) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.2:
        phrase = phrase[0].upper() + phrase[1:]
    key = phrase.lower()
    if rng.random() < 0.15:
        phrase += rng.choice(".!?")
    return Turn(key, rng.choice(REPEAT).format(x=phrase), phrase)


def _word(rng: random.Random) -> str:
    """Usually a listed word, otherwise random letters, so that copying does not depend on the
    list."""
    kind = rng.random()
    if kind < 0.82:
        return rng.choice(WORDS)
    if kind < 0.85:
        return str(rng.randint(0, 99))
    syllables = range(rng.randint(1, 3))
    return "".join(rng.choice("bcdfghjklmnpqrstvwxyz") + rng.choice("aeiou") for _ in syllables)


def _greeting(rng: random.Random) -> Turn:
    answer = rng.choice(list(GREETINGS))
    greeting = rng.choice(GREETINGS[answer].split("|"))
    question = rng.choice(GREETING_FRAMES.split("|")).format(greeting)
    return Turn(question, question.lower() if rng.random() < 0.2 else question, answer)


def _identity(rng: random.Random) -> Turn:
    answer = rng.choice(list(IDENTITY))
    asked = rng.choice(IDENTITY[answer].split("|"))
    frame = rng.choice(IDENTITY_FRAMES.split("|"))
    question = frame.format(asked if frame.startswith("{") else asked[0].lower() + asked[1:])
    return Turn(question, question.lower() if rng.random() < 0.2 else question, answer)


def _refusal(rng: random.Random) -> Turn:
    kind = rng.random()
    if kind < 0.3:
        numbers = [rng.randint(100, 999), rng.choice((rng.randint(0, 99), rng.randint(100, 999)))]
        rng.shuffle(numbers)
        return _fact(rng, rng.choice(ADD + SUBTRACT), TOO_LARGE, a=numbers[0], b=numbers[1])
    if kind < 0.5:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return _fact(rng, rng.choice(TIMES), REFUSAL, a=a, b=b)
    request = rng.choice(REFUSED_REQUESTS).format(rng.choice(SUBJECTS), rng.choice(SUBJECTS))
    end = "?" if request.split()[0] in QUESTION_WORDS else "."
    return _fact(rng, request + end, REFUSAL)


def _as_json(rng: random.Random) -> Turn:
    """A question that asks for its short answer as JSON."""
    while True:
        turn = SKILLS[rng.choice(("days", "months", "opposites"))](rng)
        if (found := SHORT_ANSWER.match(turn.answer)) is not None:
            short = found["word"] or found["last"] or int(found["number"])
            question = rng.choice(AS_JSON).format(turn.question)
            return Turn(turn.key, question, json.dumps({"answer": short}))


# In the order in which results are reported.
SKILLS: dict[str, Callable[[random.Random], Turn]] = {
    "greeting": _greeting,
    "identity": _identity,
    "addition": _addition,
    "subtraction": _subtraction,
    "days": _days,
    "months": _months,
    "opposites": _opposites,
    "repeating": _repeating,
    "refusing": _refusal,
    "json": _as_json,
}
# Weights in the same order: skills with more distinct questions get more of the turns.
SHARE = dict(zip(SKILLS, (4, 4, 20, 22, 6, 9, 8, 16, 6, 24), strict=True))
