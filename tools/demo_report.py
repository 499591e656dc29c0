"""Reports the share of held-out questions that the demo model answers right, through a replica.

Answers to texts must equal the right one; answers about pictures must have the same facts
(`demo_picture_dialogues.is_right`).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from model_zoo.chat.messages import ImagePart, ToolCall
from model_zoo.chat.messages import Message as Asked
from runtime.engine.request import SamplingParams
from serve_app.config.settings import ModelSettings
from serve_app.messages.tasks import ChatTask, Conversation
from serve_app.replica.loading import load_replica
from serve_app.replica.replica import ModelReplica
from tools import demo_dialogues, demo_picture_dialogues, demo_tools
from tools.demo_dialogues import Question
from tools.demo_model import CONTEXT_TOKENS
from tools.demo_picture_dialogues import PictureQuestion, is_right, with_text_first
from tools.demo_pictures import png
from tools.demo_tools import ToolQuestion

_Question = Question | PictureQuestion | ToolQuestion
ANSWER_TOKENS = 80
AT_ONCE = 16
PICTURE_SIDE = 192  # pixels; clients do not send pictures of the model's size either


def report(path: Path, *, per_skill: int, show: int) -> None:
    """Prints the share of right answers for each skill and for all, and `show` wrong answers."""
    texts = demo_dialogues.held_out(per_skill=per_skill)
    looks = demo_picture_dialogues.held_out(per_skill=per_skill)
    text_first = [
        replace(question, messages=with_text_first(question.messages)) for question in looks
    ]
    calls = demo_tools.held_out(per_skill=per_skill)
    questions: list[_Question] = [*texts, *calls, *looks, *text_first]
    given = asyncio.run(_answers(path, questions))
    print(f"{path}: {path.stat().st_size:,} bytes")
    groups: Mapping[str, Sequence[_Question]] = {
        "texts": texts,
        "a tool": calls,
        "image first": looks,
        "text first": text_first,
    }
    for kind, asked in groups.items():
        right: Counter[str] = Counter()
        for question in asked:
            answer = given.pop(0)
            fits = is_right if isinstance(question, PictureQuestion) else str.__eq__
            right[question.skill] += fits(question.answer, answer)
            if not fits(question.answer, answer) and show > 0:
                show -= 1
                said = [question.messages[-1]["content"], question.answer, answer]
                print(f"wrong: {question.skill} {json.dumps(said, ensure_ascii=False)}")
        for skill, count in right.items():
            print(f"{skill:12} {count / per_skill:7.1%}")
        share = right.total() / len(asked)
        print(f"{kind:12} {share:7.1%} of {len(asked)} held-out questions", flush=True)


async def _answers(path: Path, questions: Sequence[_Question]) -> list[str]:
    settings = ModelSettings(
        name="demo", source=str(path), context_tokens=CONTEXT_TOKENS, max_sequences=AT_ONCE
    )
    replica = load_replica(settings)
    slots = asyncio.Semaphore(AT_ONCE)
    try:
        asked = (_answer(replica, question, slots) for question in questions)
        return await asyncio.gather(*asked)
    finally:
        replica.close()


async def _answer(replica: ModelReplica, question: _Question, slots: asyncio.Semaphore) -> str:
    """The text of the answer, including the markup of calls."""
    tools = question.tools if isinstance(question, ToolQuestion) else ()
    messages = tuple(as_sent(message, PICTURE_SIDE) for message in question.messages)
    async with slots:
        task = ChatTask(
            id="held out",
            model="demo",
            prompt=Conversation(messages, tools=tools),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=ANSWER_TOKENS,
        )
        async with aclosing(replica.generate(task)) as deltas:
            return "".join([delta.text async for delta in deltas])


def as_sent(message: Mapping[str, Any], side: int) -> Asked:
    """The message as the server receives it, with PNG files of `side` pixels for its pictures."""
    images = [ImagePart(png(picture, side)) for picture in message.get("pictures", ())]
    text = message["content"]
    parts: tuple[str | ImagePart, ...]
    parts = (text, *images) if message.get("text_first") else (*images, text)
    functions = [each["function"] for each in message.get("tool_calls", ())]
    calls = tuple(ToolCall(each["name"], each["arguments"]) for each in functions)
    return Asked(message["role"], parts, tool_calls=calls)
