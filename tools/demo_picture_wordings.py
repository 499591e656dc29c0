"""Wordings of questions about pictures, with fields to fill.

`{x}`: the subject; `{here}` and `{picture}`: words for the picture, which may be empty.
"""

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
# Parts that may be omitted after a similar question.
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
