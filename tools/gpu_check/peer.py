"""llama.cpp's own programs and this engine with the same file on the same device, in turn.

The programs compute all layers on the device, with flash attention and a float16 cache.
`llama-batched-bench` divides the tokens of some steps by their time. It chooses the next tokens at
random, so its steps have no sampler, but copy the logits to the host. `llama-bench` computes a
prompt and the logits of its last token. This engine's times are those of `speed`, with sampling. So
that options which suit llama.cpp less do not favour this engine, loads are measured twice or with
several options, and the best speed counts.
"""

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.make_model import write_model
from runtime.quant.weight import Compute
from tests.cuda.large_model import SHAPE
from tools.gpu_check import speed
from tools.gpu_check.models import load_decoder
from tools.gpu_check.report import Goal, Task

_DECODING, _PROMPTS = "llama-batched-bench", "llama-bench"
_GOAL: Goal = ("at least", 1.0)
_DEVICES_S, _DECODING_S, _PROMPTS_S, _ONE_CACHE_S = 20.0, 75.0, 40.0, 20.0  # time limits
_ONE_CACHE_BEFORE_S = 75.0  # a cache for all streams is measured if the section is not older
_STEPS = 128  # of decoding
_WARMED_UP = 64  # positions: llama-batched-bench begins with a prompt of 16 tokens
_THREADS = 8  # for the embedding, which llama.cpp computes on the processor


def run(task: Task) -> None:
    load = speed.load_of(task)
    tokens = {f"{count} streams": count for count in load.streams}
    tokens |= {f"prefill of {length}": length for length in load.prefills}
    if task.llama_cpp is None:
        for name in tokens:
            task.report.skip(_ratio(name), "no `--llama-cpp FOLDER` is given", _GOAL)
        return
    shape = speed.TINY if task.dry else replace(SHAPE, layers=32)
    path = task.folder / "8B.gguf"
    write_model(path, speed.LABEL, speed.vocabulary(task), shape)
    theirs = _speeds_of_llama_cpp(task, task.llama_cpp, path)
    decoder = load_decoder(path, task.device, torch.bfloat16, Compute.FINE)
    path.unlink()
    for name, step_s in speed.step_seconds(task, "8B", decoder).items():
        ours = tokens[name] / step_s
        task.report.figure(f"8B, {name}", ours, "tokens/s")
        task.report.check(f"llama.cpp, {name}, is measured", name in theirs)
        if name in theirs:
            task.report.figure(f"llama.cpp, {name}", theirs[name], "tokens/s")
            task.report.figure(_ratio(name), ours / theirs[name], "", _GOAL)


def _ratio(name: str) -> str:
    return f"8B, {name}, speed by that of llama.cpp"


def decoding_speeds(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens a second by the number of streams: the best of rows of llama-batched-bench."""
    return _best((f"{row['pl']} streams", row["speed_tg"]) for row in rows)


def prompt_speeds(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Tokens a second by the length of the prompt: the best of rows of llama-bench, each the median
    of its samples."""
    return _best((f"prefill of {row['n_prompt']}", median(row["samples_ts"])) for row in rows)


def rows_of(output: str) -> list[dict[str, Any]]:
    """The objects of whole lines of JSON. Other lines, and a line that was cut off, are left
    out."""
    lines = output.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]


def _best(speeds: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in speeds:
        found[name] = max(value, found.get(name, 0.0))
    return found


def _speeds_of_llama_cpp(task: Task, folder: Path, path: Path) -> dict[str, float]:
    """The best speeds by name. RuntimeError if the programs do not find the device.

    With a cache for each stream, the prompt is computed once and copied (`-pps`); steps take the
    same time as after separate prompts. In one cache for all streams (`-kvu`) the copies would be
    the same cells, so there the prompts are separate. It is measured last, for fewer streams,
    because each stream's attention passes over the cells of all.
    """
    began, load = time.monotonic(), speed.load_of(task)
    devices = _output(task, folder, _PROMPTS, ["--list-devices"], _DEVICES_S)
    if not task.dry and "CUDA" not in devices:
        raise RuntimeError(f"llama.cpp finds no device: {devices}")
    common = ["-m", str(path), "-ngl", "99", "-fa", "on", "-t", str(_THREADS)]
    lengths = ",".join(map(str, load.prefills))
    prompts = [*common, "-p", lengths, "-n", "0", "-ub", "512,2048", "-r", "3", "-o", "jsonl"]
    found = prompt_speeds(rows_of(_output(task, folder, _PROMPTS, prompts, _PROMPTS_S)))
    separate = _decoding_options(load, (*load.streams[:-1], *load.streams))
    output = _output(task, folder, _DECODING, [*common, *separate, "-pps"], _DECODING_S)
    found |= decoding_speeds(rows_of(output))
    if task.dry or time.monotonic() - began < _ONE_CACHE_BEFORE_S:
        joint = _decoding_options(load, load.streams[:-1])
        output = _output(task, folder, _DECODING, [*common, *joint, "-kvu"], _ONE_CACHE_S)
        for name, value in decoding_speeds(rows_of(output)).items():
            task.report.figure(f"llama.cpp, {name}, one cache", value, "tokens/s")
            found[name] = max(value, found.get(name, 0.0))
    return found


def _decoding_options(load: speed.Load, streams: tuple[int, ...]) -> list[str]:
    """For steps whose mean context is that of `speed`'s steps."""
    steps = min(_STEPS, load.answer)
    prompt = load.prompt + (load.answer - steps) // 2
    context = max(_WARMED_UP, max(streams) * (prompt + steps))
    options: Mapping[str, object] = {
        "-c": context, "-b": 2048, "-ub": 2048, "-npp": prompt, "-ntg": steps,
        "-npl": ",".join(map(str, streams)), "--output-format": "jsonl",
    }  # fmt: skip
    return [str(word) for option in options.items() for word in option]


def _output(task: Task, folder: Path, program: str, options: list[str], limit_s: float) -> str:
    """What a program printed until it ended, or until its limit."""
    stdout, stderr = task.folder / "stdout", task.folder / "stderr"
    print(program, *options, flush=True)
    began = time.monotonic()
    with stdout.open("wb") as out, stderr.open("wb") as errors:
        try:
            command = [str(folder / program), *options]
            environment = _environment(folder)
            status = subprocess.run(
                command, stdout=out, stderr=errors, env=environment, timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    said = stderr.read_text(errors="replace")[-1000:]
    print(said, flush=True)
    task.report.check(
        f"{program} ends well or is stopped", status in (0, None), status=status,
        said="" if status == 0 else said[-200:], options=options,
        seconds=round(time.monotonic() - began, 1),
    )  # fmt: skip
    return stdout.read_text(errors="replace")


def _environment(folder: Path) -> dict[str, str]:
    """With the libraries beside the programs, and those of CUDA that came with torch or its
    compiler."""
    spec = importlib.util.find_spec("nvidia")
    packages = (spec.submodule_search_locations if spec else None) or ()
    beside_torch = [lib for package in packages for lib in sorted(Path(package).glob("*/lib"))]
    places = [folder, *beside_torch, Path("/usr/local/cuda/lib64")]
    before = os.environ.get("LD_LIBRARY_PATH")
    paths = [*map(str, places), *([before] if before else [])]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
    environment.pop("CUBLAS_WORKSPACE_CONFIG", None)  # of sections, for determinism
    return environment
