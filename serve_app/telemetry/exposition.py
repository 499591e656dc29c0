"""The text of `/metrics`: this application's metrics from Ray's agents on all nodes."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import httpx

from serve_app.telemetry.metrics import NODES_UNREACHABLE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
AGENT_TIMEOUT_S = 5.0
AGENTS_AT_ONCE = 16
MAX_AGENT_BYTES = 64 * 2**20
# The text is cached this long; Ray's processes report to their agents only every 10 s.
KEPT_S = 1.0
_PREFIX = "ray_caravan_"
# Labels that Ray adds and that are equal in all series.
_CONSTANT = re.compile(r"otel_scope_\w+|Component|SessionName|Version")
_GAUGE = re.compile(r"# TYPE \w+ gauge")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(rf"ray_(\w+)(?:\{{((?:{_LABEL.pattern},?)*)\}})? (.*)")

AgentUrls = Callable[[], Awaitable[Sequence[str]]]


class ClusterExposition:
    """Reads the metrics of the agents of all nodes. `urls`: returns their URLs."""

    def __init__(self, urls: AgentUrls) -> None:
        self._urls = urls
        self._client = httpx.AsyncClient(timeout=AGENT_TIMEOUT_S, trust_env=False)
        self._reading = asyncio.Lock()
        self._places = asyncio.Semaphore(AGENTS_AT_ONCE)
        self._text, self._read_at = "", float("-inf")

    async def __call__(self) -> str:
        """The text. Concurrent callers share the agents' answers, which are at most `KEPT_S`
        old."""
        async with self._reading:
            if time.monotonic() - self._read_at > KEPT_S:
                self._text = await self._collect()
                self._read_at = time.monotonic()
            return self._text

    async def _collect(self) -> str:
        answers = await asyncio.gather(*(self._agent(url) for url in await self._urls()))
        texts = [answer for answer in answers if answer is not None]
        missing = len(answers) - len(texts)
        return await asyncio.to_thread(merged, texts) + _nodes_unreachable(missing)

    async def _agent(self, url: str) -> str | None:
        """The text of an agent; None if it does not answer or its text exceeds
        `MAX_AGENT_BYTES`."""
        try:
            async with (
                self._places,
                asyncio.timeout(AGENT_TIMEOUT_S),
                self._client.stream("GET", url) as response,
            ):
                response.raise_for_status()
                data = bytearray()
                async for part in response.aiter_bytes():
                    data += part
                    if len(data) > MAX_AGENT_BYTES:
                        return None
                return data.decode()
        except (httpx.HTTPError, TimeoutError, UnicodeDecodeError):
            return None


async def no_exposition() -> str:
    """The text of an ingress without Ray: empty."""
    return _nodes_unreachable(0)


def merged(texts: Iterable[str]) -> str:
    """Merges this application's metrics from the texts of several agents: each metric once, without
    Ray's prefix, and without labels that are equal in all series.

    Ray's agents keep the counters of ended processes, so those of replicas without any gauge are
    left out: a running replica sets its gauges all the time, and agents forget a gauge that has not
    been set for two of Ray's reporting intervals.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[_Sample]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, what, name, *_ = line.split(" ", 3)
                family = name if name.startswith(_PREFIX) else ""
                head = heads.setdefault(family, [])
                if family and not any(each.startswith(f"# {what} ") for each in head):
                    head.append(line.replace(_PREFIX, "caravan_", 1))
            elif family and line.startswith(_PREFIX):
                samples.setdefault(family, []).append(_sample(line))
    gauges = {family for family, head in heads.items() if any(map(_GAUGE.fullmatch, head))}
    running = {each.replica for family in gauges for each in samples.get(family, ())} | {None}
    lines = []
    for family in sorted(samples):
        kept = [each.line for each in samples[family] if each.replica in running]
        lines += [*heads[family], *kept] if kept else []
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class _Sample:
    """A line of the text, and the value of its label `replica`; None without that label."""

    line: str
    replica: str | None


def _sample(line: str) -> _Sample:
    found = _SAMPLE.fullmatch(line)
    assert found is not None, "an agent of Ray writes the text format"
    name, value = found[1], found[5]
    labels = dict(_LABEL.findall(found[2] or ""))
    kept = (f'{label}="{text}"' for label, text in labels.items() if not _CONSTANT.fullmatch(label))
    return _Sample(f"{name}{{{','.join(kept)}}} {value}", labels.get("replica"))


def _nodes_unreachable(missing: int) -> str:
    name = NODES_UNREACHABLE.name
    return f"# HELP {name} {NODES_UNREACHABLE.description}\n# TYPE {name} gauge\n{name} {missing}\n"
