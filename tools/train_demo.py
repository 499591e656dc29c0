"""Train the demo model on generated dialogues and write it as one GGUF file.

    python tools/train_demo.py --out models/demo.gguf       train, write, report
    python tools/train_demo.py --check models/demo.gguf     report only

The model adds and subtracts numbers up to 99 (sums up to 198, differences never negative), knows
days, months and opposites, repeats phrases, greets, says who it is and refuses the rest. The
report counts exact answers to held-out questions, asked of the weights as the file rounds them.
"""

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

# With other work on the cores, threads that spin while they wait cost ten times the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from demo_dialogues import SKILLS, Question, held_out, training_dialogues, training_sums
from demo_gguf import (
    CONTROL_TOKENS,
    END,
    END_OF_TEXT,
    byte_level_tokenizer,
    read_model,
    render,
    write_model,
)
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 768
CONTEXT_TOKENS = 1024
TOKENS_PER_STEP = 2048
SHORT_ROW = 256
# Rows as long as the context cost more per token, so only every eighth step has them.
LONG_ROW_EVERY = 8
ROWS_OF_SUMS = 3
UNSCORED = -100
PEAK_RATE = 2e-3
WARM_UP_SHARE = 0.03
ANSWER_TOKENS = 80


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    started = time.monotonic()
    if options.check is None:
        torch.manual_seed(options.seed)
        tokenizer = train_tokenizer(options.seed)
        model = LlamaForCausalLM(architecture(tokenizer))
        print(f"{model.num_parameters():,} parameters", flush=True)
        train(model, tokenizer, seed=options.seed, steps=options.steps, minutes=options.minutes)
        unfinished = options.out.with_suffix(".part")
        write_model(unfinished, model, tokenizer)
        os.replace(unfinished, options.out)
        print(f"trained in {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    report(options.check or options.out, per_skill=options.questions, show=options.show)
    print(f"finished after {(time.monotonic() - started) / 60:.1f} minutes")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/demo.gguf"))
    parser.add_argument("--check", type=Path, help="evaluate this file, train nothing")
    parser.add_argument("--minutes", type=float, default=34.0, help="limit of training time")
    parser.add_argument("--steps", type=int, default=8000, help="limit of training steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--questions", type=int, default=60, help="held-out questions per skill")
    parser.add_argument("--show", type=int, default=10, help="print so many wrong answers")
    return parser.parse_args()


def architecture(tokenizer: Tokenizer) -> LlamaConfig:
    """Every width is a multiple of 256, so the file can also be written in 256-element blocks."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(END),
    )


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE over the training dialogues.

    It is shown ASCII only: other characters stay several tokens long, so that streaming them
    means putting tokens together.
    """
    tokenizer = byte_level_tokenizer(BPE())
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = (turn for dialogue in islice(training_dialogues(seed), 8000) for turn in dialogue)
    texts = (f"{turn['role']}\n{turn['content']}".encode("ascii", "ignore") for turn in turns)
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return tokenizer


def train(
    model: LlamaForCausalLM, tokenizer: Tokenizer, *, seed: int, steps: int, minutes: float
) -> None:
    """The rate falls with steps or with time, whichever is further on: both end at zero."""
    started = time.monotonic()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )
    batches = training_batches(tokenizer, seed)
    model.train()
    for step in range(steps):
        spent = (time.monotonic() - started) / 60
        progress = max(step / steps, spent / minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * _rate(progress)
        ids, labels = next(batches)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}, {spent:.1f} minutes, loss {loss.item():.4f}", flush=True)
    print(f"{step + 1} steps", flush=True)


def _rate(progress: float) -> float:
    """Share of the peak rate: a short straight rise, then a cosine down to zero."""
    if progress < WARM_UP_SHARE:
        return (progress + 1e-3) / WARM_UP_SHARE
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE)))


def training_batches(
    tokenizer: Tokenizer, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels, both [rows, tokens]; a row holds dialogues that see the ones before them.

    Three short rows of eight hold bare sums, of which only the results are scored.
    """
    dialogues, sums = training_dialogues(seed), training_sums(seed)
    header = tokenizer.encode(render([], reply=True)).ids
    equals = tokenizer.encode(" =").ids
    end = tokenizer.token_to_id(END)
    for step in count():
        long = step % LONG_ROW_EVERY == LONG_ROW_EVERY - 1
        width, of_sums = (CONTEXT_TOKENS, 0) if long else (SHORT_ROW, ROWS_OF_SUMS)
        of_chats = TOKENS_PER_STEP // width - of_sums
        chats = [_row(dialogues, tokenizer, width) for _ in range(of_chats)]
        lists = [_row(sums, tokenizer, width) for _ in range(of_sums)]
        labels = [_scored(row, header, end) for row in chats]
        labels += [_scored(row, equals, end) for row in lists]
        yield torch.tensor(chats + lists), torch.tensor(labels)


def _row(dialogues: Iterator[list[dict[str, str]]], tokenizer: Tokenizer, width: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < width:
        ids += tokenizer.encode(render(next(dialogues), reply=False)).ids
    return ids[:width]


def _scored(ids: list[int], opener: list[int], end: int) -> list[int]:
    """Labels for what follows each opener, up to and with the token that ends the reply."""
    labels = [UNSCORED] * len(ids)
    replying = False
    for position, token in enumerate(ids):
        if replying:
            labels[position] = token
            replying = token != end
        else:
            replying = ids[max(0, position + 1 - len(opener)) : position + 1] == opener
    return labels


def report(path: Path, *, per_skill: int, show: int) -> None:
    model, tokenizer = read_model(path)
    questions = held_out(per_skill=per_skill)
    right: Counter[str] = Counter()
    for question, given in zip(questions, answers(model, tokenizer, questions), strict=True):
        right[question.skill] += given == question.answer
        if given != question.answer and show > 0:
            show -= 1
            asked = question.messages[-1]["content"]
            print(f"wrong: {json.dumps([asked, question.answer, given], ensure_ascii=False)}")
    print(f"{path}: {path.stat().st_size:,} bytes")
    for skill in SKILLS:
        print(f"{skill:12} {right[skill] / per_skill:7.1%}")
    overall = right.total() / len(questions)
    print(f"{'overall':12} {overall:7.1%} of {len(questions)} held-out questions")


@torch.inference_mode()
def answers(model: LlamaForCausalLM, tokenizer: Tokenizer, questions: list[Question]) -> list[str]:
    """Greedy replies, in the order asked; prompts of one length share a batch without padding."""
    prompts = [tokenizer.encode(render(ask.messages, reply=True)).ids for ask in questions]
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    replies = [""] * len(questions)
    for length, indexes in by_length.items():
        batch = torch.tensor([prompts[index] for index in indexes])
        written = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
        )
        for index, row in zip(indexes, written[:, length:].tolist(), strict=True):
            replies[index] = tokenizer.decode(row, skip_special_tokens=True)
    return replies


if __name__ == "__main__":
    main()
