"""`python -m tests.fuzz.sanitized_target FOLDER NUMBER FILES SECONDS`: computes mutated files.

Prints one line per file. The file in use is in FOLDER/work-NUMBER, where it remains if a sanitizer
ends the process.
"""

import asyncio
import contextlib
import faulthandler
import hashlib
import shutil
import sys
import time
import traceback
from pathlib import Path
from random import Random

import torch

import tests.fuzz.sanitized  # noqa: F401  replaces the kernels
from model_zoo.chat.messages import ImagePart, Message
from model_zoo.chat_model import ChatModel
from model_zoo.registry import load
from runtime.engine.assembly import assemble
from runtime.engine.engine_options import EngineOptions
from runtime.engine.request import (
    Delta,
    FinishReason,
    GenerationRequest,
    ImageSpan,
    Pooling,
    SamplingParams,
    StopRules,
)
from runtime.errors import CaravanError, RequestError
from runtime.vision.encoder import LocalEncoder
from tests.fuzz.architectures import MODEL, PROJECTOR, Seed
from tests.fuzz.value_mutations import with_changed_values
from tests.vision_prompts import png

CPU = torch.device("cpu")
TEXT = "the quick brown fox jumps over the lazy dog and says hello to the user"
IMAGE = ImagePart(png(60, 130))
TOKENS = 4
MEMORY_BYTES = 1 << 28
HANG_S = 300  # a file that takes longer under sanitizers is a finding


def exercise(model: Path, projector: Path | None) -> str:
    """The stage that the files reached; any error but a CaravanError is a defect."""
    try:
        chat = load(model, projector=projector, device=CPU, dtype=torch.float32)
    except CaravanError:
        return "refused"
    try:
        request = _request(chat)
    except RequestError:
        return "prompt refused"
    context_tokens = min(256, chat.decoder.context_length)
    options = EngineOptions(
        context_tokens=context_tokens,
        max_sequences=2,
        step_tokens=16 if chat.decoder.causal else context_tokens,  # it computes whole texts
        memory_bytes=MEMORY_BYTES,
    )
    encoder = None if chat.tower is None else LocalEncoder(chat.tower, device=CPU, weight_bytes=0)
    try:
        engine, _ = assemble(
            chat.decoder, chat.tokenizer.token_bytes, device=CPU, options=options, encoder=encoder
        )
    except CaravanError:
        return "not started"
    engine.start()

    async def last() -> Delta:
        async with contextlib.aclosing(engine.stream(request)) as deltas:
            return [delta async for delta in deltas][-1]

    try:
        delta = asyncio.run(last())
    except CaravanError:
        return "request refused"
    finally:
        engine.close()
    return "failed by name" if delta.finish is FinishReason.FAILED else "computed"


def _request(chat: ChatModel) -> GenerationRequest:
    if chat.tower is not None:
        prompt = chat.prepare([Message("user", (IMAGE, TEXT))])
        spans, images = prompt.spans, prompt.images
    else:
        prompt = chat.prepare_text(TEXT)
        spans, images = (), ()
    pooling = None
    if not chat.decoder.generates:
        pooling = Pooling.MEAN
        spans = (ImageSpan(0, len(prompt.tokens), whole=True, digest=b""),)
    return GenerationRequest(
        "one",
        prompt.tokens,
        StopRules(TOKENS),
        SamplingParams(temperature=1.0, repeat_penalty=1.1, logprobs=2),
        spans=spans,
        images=images,
        pooling=pooling,
    )


def main(folder: Path, number: int, files: int, seconds: float) -> None:
    seeds = [Seed(place) for place in sorted((folder / "seeds").iterdir())]
    work = folder / f"work-{number}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    deadline = time.monotonic() + seconds
    for index in range(files):
        if time.monotonic() > deadline:
            break
        random = Random(f"{number} {index}")
        seed = random.choice(seeds)
        model, projector = _damaged_copy(seed, work, random)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            outcome = exercise(model, projector)
        except Exception as error:
            outcome = "DEFECT"
            _keep(folder, work, seed, error)
        faulthandler.cancel_dump_traceback_later()
        print(f"{seed.name}\t{outcome}", flush=True)
    shutil.rmtree(work)


def _damaged_copy(seed: Seed, work: Path, random: Random) -> tuple[Path, Path | None]:
    model, projector = seed.model.read_bytes(), None
    if seed.projector is not None:
        projector = seed.projector.read_bytes()
    if projector is not None and random.random() < 0.7:
        projector = with_changed_values(projector, random)
    else:
        model = with_changed_values(model, random)
    (work / MODEL).write_bytes(model)
    (work / PROJECTOR).unlink(missing_ok=True)
    if projector is not None:
        (work / PROJECTOR).write_bytes(projector)
    return work / MODEL, None if projector is None else work / PROJECTOR


def _keep(folder: Path, work: Path, seed: Seed, error: Exception) -> None:
    """Keeps the first files for each place that raises an error."""
    frames = traceback.extract_tb(error.__traceback__)
    where = "".join(f"{frame.filename}:{frame.lineno}" for frame in frames)
    digest = hashlib.sha256(f"{type(error)}{where}".encode()).hexdigest()[:8]
    kept = folder / "found" / f"error-{digest}"
    if kept.exists():
        return
    shutil.copytree(work, kept)
    (kept / "error.txt").write_text(f"{seed.name}\n\n{''.join(traceback.format_exception(error))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
