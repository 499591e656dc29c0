"""The same engine behind Ray Serve: a real application, measured through HTTP."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.contender import TEMPERATURE, TOP_K, TOP_P, Clock, Decoding, Setting

NAME = "measured"
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


class Served:
    """`serve run` with one model; ends when closed."""

    def __init__(self, path: Path, setting: Setting) -> None:
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="caravan-bench-")
        config = Path(self._folder.name) / "serve.yaml"
        config.write_text(yaml.safe_dump(_config(path, setting, port)))
        self._log = (Path(self._folder.name) / "log").open("w+")
        self._process = subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", config],
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._wait_until_ready()

    def prefill(self, prompt: Sequence[int]) -> float:
        return asyncio.run(self._first_token(prompt))

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        return asyncio.run(self._answer_all(prompts, tokens))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._log.close()
        self._folder.cleanup()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/healthz").status_code == 200:
                    return
            time.sleep(0.5)
        self._log.seek(0)
        message = self._log.read()[-4000:]
        self.close()
        raise SystemExit(f"The served application did not become ready:\n{message}")

    async def _first_token(self, prompt: Sequence[int]) -> float:
        async with httpx.AsyncClient(timeout=None) as client:
            await client.get(f"{self._url}/healthz")  # connected, as a client of some standing is
            begin = time.perf_counter()
            reply = await client.post(f"{self._url}/v1/completions", json=_body(prompt, 1))
            reply.raise_for_status()
            return time.perf_counter() - begin

    async def _answer_all(self, prompts: Sequence[Sequence[int]], tokens: int) -> Decoding:
        clock = Clock(len(prompts))
        async with httpx.AsyncClient(timeout=None) as client:
            answers = (
                self._answer(client, clock, sequence, prompt, tokens)
                for sequence, prompt in enumerate(prompts)
            )
            await asyncio.gather(*answers)
        return clock.stop()

    async def _answer(
        self,
        client: httpx.AsyncClient,
        clock: Clock,
        sequence: int,
        prompt: Sequence[int],
        tokens: int,
    ) -> None:
        """A chunk is at least one token; the usage at the end tells how many there were in all."""
        body = {**_body(prompt, tokens), "stream": True, "stream_options": {"include_usage": True}}
        seen = 0
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if any(choice["text"] for choice in chunk["choices"]):
                    clock.saw(sequence, 1)
                    seen += 1
                elif chunk.get("usage"):
                    clock.saw(sequence, chunk["usage"]["completion_tokens"] - seen)


def _body(prompt: Sequence[int], tokens: int) -> dict[str, object]:
    return {
        "model": NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "seed": 1,
    }


def _config(path: Path, setting: Setting, port: int) -> dict[str, Any]:
    """The quickstart's, with another port and model."""
    config = yaml.safe_load(QUICKSTART.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    model = {
        "name": NAME,
        "source": str(path),
        "context_tokens": setting.context_tokens,
        "device": "cpu",
        "max_sequences": setting.sequences,
        "step_tokens": setting.step_tokens,
        "cache_tokens": setting.context_tokens * setting.sequences,
        "threads": setting.threads,
        "defaults": {"top_k": TOP_K},
    }
    config["applications"][0]["args"]["models"] = [model]
    return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
