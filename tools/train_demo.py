"""Trains the demo model on generated dialogues and pictures, and writes it as one GGUF file.

    python -m tools.train_demo --out models/demo.gguf       train, write, report
    python -m tools.train_demo --start models/demo.gguf --decoder-minutes 30 --decoder-rate 6e-4
                                                            continue the training of a file
    python -m tools.train_demo --check models/demo.gguf     report only

First the vision model is trained alone on the content of pictures. Then it is frozen, and the
decoder is trained on dialogues; each step has texts and pictures. The report sends held-out
questions to the file itself.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any

# On busy cores, spinning threads make training ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from tokenizers import Tokenizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Gemma3ForConditionalGeneration

from tools import demo_dialogues, demo_picture_dialogues, demo_tools
from tools.demo_facts import FactReaders
from tools.demo_file import read_model
from tools.demo_model import (
    CONTEXT_TOKENS,
    END,
    batch,
    new_model,
    pixels,
    render,
    render_with_pictures,
    scored,
    train_tokenizer,
    write_vision_model,
)
from tools.demo_picture_dialogues import Message
from tools.demo_pictures import Picture, invent, invent_crowd
from tools.demo_report import report

PICTURES_PER_STEP = 32  # while only the vision model is trained
CROWDED_SHARE = 0.7  # share of these pictures with items in most places, which teach more
PICTURE_TOKENS = 4096  # per step, padding included
ROWS_SORTED = 1024  # so many rows are sorted by length, so that steps have little padding
TEXTS_EVERY = 2  # every n-th step has texts, the easier part
TOKENS_PER_STEP = 2048  # tokens of texts
SHORT_ROW, TOOL_ROW = 256, 512
TOOLS_EVERY = 2  # every n-th step of texts has dialogues with tools
# Rows with the length of the context cost more per token, so only every eighth step has them.
LONG_ROW_EVERY = 8
ROWS_OF_SUMS = 3
VISION_RATE, DECODER_RATE = 1e-3, 1.5e-3
WARM_UP_SHARE = 0.03
MEAN_DECAY = 0.995  # the file has the mean of the weights of about the last 200 steps
SAVE_EVERY_MINUTES = 5.0


@dataclass(slots=True)
class Training:
    """A checkpoint: the model, and the minutes spent on each of the two parts."""

    model: Gemma3ForConditionalGeneration
    tokenizer: Tokenizer
    readers: FactReaders
    spent: dict[str, float]

    def save(self, path: Path, optimizers: list[torch.optim.Optimizer]) -> None:
        state = {
            "model": self.model.state_dict(),
            "readers": self.readers.state_dict(),
            "spent": self.spent,
            "tokenizer": self.tokenizer.to_str(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        unfinished = path.with_suffix(".part")
        torch.save(state, unfinished)
        os.replace(unfinished, path)


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.check is None:
        torch.manual_seed(options.seed)
        training = train(options)
        unfinished = options.out.with_suffix(".part")
        write_vision_model(unfinished, training.model.eval(), training.tokenizer)
        os.replace(unfinished, options.out)
        if options.checkpoint:
            # The next training starts from scratch; to continue this one, rename the file back.
            os.replace(options.checkpoint, options.checkpoint.with_suffix(".finished"))
    report(options.check or options.out, per_skill=options.questions, show=options.show)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/demo.gguf"))
    parser.add_argument("--start", type=Path, help="begin with this file's weights, vision frozen")
    parser.add_argument("--check", type=Path, help="evaluate this file, train nothing")
    parser.add_argument(
        "--vision-minutes", type=float, default=25.0, help="minutes for the vision model alone"
    )
    parser.add_argument("--decoder-minutes", type=float, default=75.0, help="of the decoder")
    parser.add_argument(
        "--decoder-rate", type=float, default=DECODER_RATE, help="peak learning rate"
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="save the training here, and continue it from here"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--questions", type=int, default=60, help="held-out questions per skill")
    parser.add_argument("--show", type=int, default=10, help="number of wrong answers to print")
    return parser.parse_args()


def train(options: argparse.Namespace) -> Training:
    """Trains both parts for their minutes; with a checkpoint, for the remaining minutes."""
    saved: dict[str, Any] = {}
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
    training = _begin(options, saved)
    model = training.model
    print(f"{model.num_parameters():,} parameters", flush=True)
    # A continued training uses other examples.
    seed = f"{options.seed} {training.spent}"
    model.train()
    vision = torch.nn.ModuleList(
        [model.model.vision_tower, model.model.multi_modal_projector, training.readers]
    )
    if training.spent["decoder"] == 0 and options.start is None:
        losses = _vision_losses(training, seed)
        optimizers = _optimizers(vision, VISION_RATE)
        _descend("vision", training, optimizers, losses, options.vision_minutes, options, saved)
    vision.eval()
    losses = _decoder_losses(training, seed)
    decoder = model.model.language_model
    optimizers = _optimizers(decoder, options.decoder_rate)
    mean = AveragedModel(decoder, multi_avg_fn=get_ema_multi_avg_fn(MEAN_DECAY))
    optimizers[-1].register_step_post_hook(lambda *_: mean.update_parameters(decoder))
    _descend("decoder", training, optimizers, losses, options.decoder_minutes, options, saved)
    decoder.load_state_dict(mean.module.state_dict())
    return training


def _begin(options: argparse.Namespace, saved: dict[str, Any]) -> Training:
    """The training to start with: that of a checkpoint, the weights of a file, or random
    weights."""
    if saved:
        tokenizer = Tokenizer.from_str(saved["tokenizer"])
        model = new_model(tokenizer)
    elif options.start is not None:
        model, tokenizer = read_model(options.start)
    else:
        tokenizer = train_tokenizer(options.seed)
        model = new_model(tokenizer)
    readers = FactReaders(model.config.text_config.hidden_size)
    training = Training(model, tokenizer, readers, {"vision": 0.0, "decoder": 0.0})
    if saved:
        model.load_state_dict(saved["model"])
        readers.load_state_dict(saved["readers"])
        training.spent = saved["spent"]
    return training


def _optimizers(module: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest; the rate is AdamW's."""
    matrices, rest = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for name, part in module.named_parameters():
        (matrices if part.ndim == 2 and "layers." in name else rest).append(part)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True),
    ]


def _descend(
    part: str,
    training: Training,
    optimizers: list[torch.optim.Optimizer],
    losses: Iterator[str],
    minutes: float,
    options: argparse.Namespace,
    saved: dict[str, Any],
) -> None:
    """Trains for the given minutes; the learning rates rise, then fall to zero."""
    before = training.spent[part]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    if 0 < before < minutes:
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    started, kept = time.monotonic(), before
    for step in count():
        spent = before + (time.monotonic() - started) / 60
        if spent >= minutes:
            break
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * _rate(spent / minutes)
        progress = next(losses)
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{part}: step {step}, {spent:.1f} minutes, {progress}", flush=True)
        if options.checkpoint and spent - kept > SAVE_EVERY_MINUTES:
            training.spent[part] = kept = spent
            training.save(options.checkpoint, optimizers)
    training.spent[part] = minutes
    if options.checkpoint:
        training.save(options.checkpoint, optimizers)
    print(f"{part}: {step} steps", flush=True)


def _rate(progress: float) -> float:
    """The fraction of the peak learning rate: a short linear rise, then a cosine to zero."""
    if progress < WARM_UP_SHARE:
        return (progress + 1e-3) / WARM_UP_SHARE
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP_SHARE) / (1 - WARM_UP_SHARE)))


def _vision_losses(training: Training, seed: str) -> Iterator[str]:
    """Propagates the loss of each step back, and yields the shares of right answers."""
    rng, model = Random(f"vision {seed}"), training.model.model
    while True:
        pictures = [_any_picture(rng) for _ in range(PICTURES_PER_STEP)]
        with torch.autocast("cpu", torch.bfloat16):
            seen = model.vision_tower(torch.stack([pixels(picture) for picture in pictures]))
            features = model.multi_modal_projector(seen.last_hidden_state)
        loss, shares = training.readers.losses(features, pictures)
        loss.backward()
        yield ", ".join(f"{question} {share:.0%}" for question, share in shares.items())


def _any_picture(rng: Random) -> Picture:
    if rng.random() < CROWDED_SHARE:
        return invent_crowd(rng)
    number = rng.random() < 0.5
    shapes = rng.choice((0, 0, 1, 2)) if number else rng.choice((1, 1, 2, 3, 4, 5))
    return invent(rng, held=False, shapes=shapes, number=number)


def _decoder_losses(training: Training, seed: str) -> Iterator[str]:
    """Propagates the losses of each step back, of texts and dialogues about pictures, and yields
    them."""
    model = training.model
    texts = _text_batches(training.tokenizer, seed)
    pictures = _picture_batches(training.tokenizer, seed)
    for step in count():
        if step % TEXTS_EVERY == 0:
            ids, labels = next(texts)
            with torch.autocast("cpu", torch.bfloat16):
                nothing = torch.zeros_like(ids)
                text_loss = model(input_ids=ids, labels=labels, token_type_ids=nothing).loss
            text_loss.backward()
        inputs = next(pictures)
        with torch.autocast("cpu", torch.bfloat16):
            features = {}
            if "pixel_values" in inputs:
                with torch.no_grad():
                    features["image"] = model.get_image_features(inputs.pop("pixel_values"))
            picture_loss = model(**inputs, mm_encoder_outputs=features).loss
        picture_loss.backward()
        yield f"texts {text_loss.item():.4f}, pictures {picture_loss.item():.4f}"


def _picture_batches(tokenizer: Tokenizer, seed: str) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of dialogues about pictures, as arguments of the model's `forward`."""
    dialogues = demo_picture_dialogues.training_dialogues(f"seeing {seed}")
    order = Random(f"order {seed}")
    while True:
        steps: list[list[Sequence[Message]]] = [[]]
        for length, _, row in sorted(
            (len(tokenizer.encode(render_with_pictures(row, reply=False)).ids), index, row)
            for index, row in enumerate(islice(dialogues, ROWS_SORTED))
        ):
            if (len(steps[-1]) + 1) * length > PICTURE_TOKENS:
                steps.append([])
            steps[-1].append(row)
        order.shuffle(steps)
        for rows in steps:
            yield batch(rows, tokenizer)


def _text_batches(tokenizer: Tokenizer, seed: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels, both [rows, tokens]. A row holds several dialogues, which attend to earlier
    ones.

    Every second step has dialogues with tools. In the other steps, three short rows of eight have
    plain sums, of which only the results are scored.
    """
    dialogues = map(_rendered, demo_dialogues.training_dialogues(f"texts {seed}"))
    sums = map(_rendered, demo_dialogues.training_sums(f"texts {seed}"))
    calls = (
        _rendered(demo_tools.as_text(each.messages, each.tools))
        for each in demo_tools.training_dialogues(f"texts {seed}")
    )
    header = tokenizer.encode(render([], reply=True)).ids
    equals = tokenizer.encode(" =").ids
    [end] = tokenizer.encode(END).ids
    for step in count():
        if step % TOOLS_EVERY:
            chats = _rows(calls, tokenizer, TOOL_ROW, TOKENS_PER_STEP // TOOL_ROW)
            yield torch.tensor(chats), torch.tensor([scored(row, header, end) for row in chats])
            continue
        long = step // TOOLS_EVERY % LONG_ROW_EVERY == LONG_ROW_EVERY - 1
        width, of_sums = (CONTEXT_TOKENS, 0) if long else (SHORT_ROW, ROWS_OF_SUMS)
        chats = _rows(dialogues, tokenizer, width, TOKENS_PER_STEP // width - of_sums)
        lists = _rows(sums, tokenizer, width, of_sums)
        labels = [scored(row, header, end) for row in chats]
        labels += [scored(row, equals, end) for row in lists]
        yield torch.tensor(chats + lists), torch.tensor(labels)


def _rendered(dialogue: Sequence[Mapping[str, str]]) -> str:
    return render(dialogue, reply=False)


def _rows(texts: Iterator[str], tokenizer: Tokenizer, width: int, count: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(count)]
    for row in rows:
        while len(row) < width:
            row += tokenizer.encode(next(texts)).ids
        del row[width:]
    return rows


if __name__ == "__main__":
    main()
