"""`caravan bench`: measures a server under load."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from model_zoo.sources.proxies import proxy_of, trusted_certificates
from serve_app.cli.completion import served_models
from serve_app.cli.server import CONNECT_S, Server, server_options
from serve_app.cli.terminal import plain, print_error, print_pairs, print_table, print_title
from serve_app.load_test.charts import cumulative_svg, histogram, seconds
from serve_app.load_test.measuring import Load, LoadClient, Sample, run_load
from serve_app.load_test.summary import LoadSummary, summarise, values_of
from serve_app.load_test.workload import (
    LengthRange,
    LoadRequest,
    arrivals,
    random_requests,
    requests_of_file,
)

_COLUMNS = ("measure", "mean>", "p50>", "p90>", "p99>", "most>")
_PLOTTED = ("first token", "between parts", "latency")
_SHOWN_ERRORS = 5
_MOST_REQUESTS = 100_000
_SEEDS = 10**9


class _Length(click.ParamType):
    """`N`, or `N-M`: a range from which each length is drawn."""

    name = "length"

    def convert(self, value: Any, param: Any, ctx: Any) -> LengthRange:
        least, _, most = str(value).partition("-")
        if not (least.isdecimal() and (most or least).isdecimal()):
            self.fail(f"{value!r} is neither N nor N-M.", param, ctx)
        made = LengthRange(int(least), int(most or least))
        if not 1 <= made.least <= made.most <= 10**6:
            self.fail(f"{value!r} is not within 1 to 1000000, the smaller first.", param, ctx)
        return made


@click.command(
    epilog="""\b
Examples:
  caravan bench demo
  caravan bench demo --concurrency 16 --requests 200 --answer-tokens 128 --ignore-eos
  caravan bench demo --rate 2.5 --prompt-words 50-500 --max-seconds 60
  caravan bench demo --prompts prompts.jsonl --json samples.json --plot latency.svg
"""
)
@server_options
@click.argument("model", shell_complete=served_models)
@click.option(
    "--requests",
    "count",
    type=click.IntRange(1, _MOST_REQUESTS),
    default=50,
    show_default=True,
    help="Number of measured requests.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 10_000),
    help="Maximum concurrent requests; default: 4, or no limit with --rate. With both, requests "
    "that are due while this number runs are sent late, and counted as late.",
)
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests per second, in a Poisson process.",
)
@click.option(
    "--prompt-words",
    type=_Length(),
    default="100",
    show_default=True,
    metavar="N|N-M",
    help="Length of random prompts.",
)
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    help="JSON lines with `prompt` or `messages`, and optionally `max_tokens`.",
)
@click.option(
    "--answer-tokens",
    type=_Length(),
    default="64",
    show_default=True,
    metavar="N|N-M",
    help="Maximum tokens of an answer.",
)
@click.option(
    "--ignore-eos",
    is_flag=True,
    help="Always generate this many tokens; not all servers support it.",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0, _MOST_REQUESTS),
    default=2,
    show_default=True,
    help="Number of requests before the measured ones.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    default=600,
    show_default=True,
    help="Time limit of the test, and of the warm-up.",
)
@click.option(
    "--seed", type=int, help="Seed of prompts, lengths and starts; default: another one each time."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all samples to this file.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the distributions to this SVG file.",
)
def bench(
    server: Server, model: str, json_file: Path | None, plot: Path | None, **given: Any
) -> None:
    """Measure a server that answers many requests for MODEL.

    Times are measured here, in OpenAI's protocol: to the first token, between the parts of an
    answer, per token, and to the end. Ctrl-C ends the test and shows the results so far.
    If no answer is complete, only errors are shown, and the exit status is 1.
    """
    for path in filter(None, (json_file, plot)):
        _check_writable(path)
    if given["seed"] is None:
        given["seed"] = secrets.randbelow(_SEEDS)
    began = datetime.now(UTC)
    samples = asyncio.run(_run(server, model, given))
    if not samples:
        raise click.ClickException("The test ended before a request was sent.")
    summary = summarise(samples)
    if summary.complete:
        _print(summary, samples, given["seed"])
    for error, count in list(summary.errors.items())[:_SHOWN_ERRORS]:
        print_error(f"{count} × {error}")
    if json_file is not None:
        document: dict[str, Any] = {"model": model, "host": server.host}
        document |= {
            "begun": began.isoformat(),
            "options": {name: _stated(value) for name, value in given.items()},
        }
        document |= {"summary": asdict(summary), "samples": [asdict(each) for each in samples]}
        json_file.write_text(json.dumps(plain(document), allow_nan=False) + "\n")
    if plot is not None:
        panels = {name: values for name in _PLOTTED if (values := values_of(samples, name))}
        plot.write_text(cumulative_svg(f"{model}: share of values up to x", panels))
    if not summary.complete:
        raise click.exceptions.Exit(1)


def _check_writable(path: Path) -> None:
    """OSError if the file cannot be written; leaves it as it is."""
    is_new = not path.exists()
    if is_new or path.is_file():  # not a pipe, whose reader would take this for the end
        path.open("a").close()
    if is_new:
        path.resolve().unlink()


def _requests(given: dict[str, Any]) -> Iterator[LoadRequest]:
    if given["prompts"] is not None:
        return requests_of_file(given["prompts"], given["answer_tokens"], given["seed"])
    return random_requests(given["prompt_words"], given["answer_tokens"], given["seed"])


async def _run(server: Server, model: str, given: dict[str, Any]) -> list[Sample]:
    """Runs warm-up and test; returns the samples of the test."""
    requests, max_s = _requests(given), given["max_seconds"]
    concurrency = given["concurrency"] or (None if given["rate"] else 4)
    starts = arrivals(given["rate"], given["seed"]) if given["rate"] else None
    load = Load(concurrency, starts, max_s)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=server.host,
        headers=server.headers,
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=limits,
        verify=trusted_certificates(),
        proxy=proxy_of(httpx.URL(server.host), os.environ),
        trust_env=False,
    ) as http:
        client = LoadClient(http, model, ignore_eos=given["ignore_eos"])
        if given["warm_up"]:
            first = Load(concurrency or given["warm_up"], None, max_s)
            await run_load(client, requests, given["warm_up"], first, lambda sample: None)
            if (task := asyncio.current_task()) and task.cancelling():
                return []
        with Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        ) as bars:
            bar = bars.add_task("", total=given["count"])
            return await run_load(
                client, requests, given["count"], load, lambda sample: bars.advance(bar)
            )


def _print(summary: LoadSummary, samples: Sequence[Sample], seed: int) -> None:
    due = "" if summary.due_per_s is None else f", {summary.due_per_s:.2f} were due"
    print_pairs(
        [
            (
                "requests",
                f"{summary.complete} complete of {summary.requests} in {seconds(summary.seconds)}",
            ),
            ("rate", f"{summary.requests_per_s:.2f} requests/s{due}"),
            ("prompts", f"{summary.prompt_tokens} tokens, {summary.prompt_tokens_per_s:.1f} per s"),
            ("answers", f"{summary.answer_tokens} tokens, {summary.answer_tokens_per_s:.1f} per s"),
            ("seed", str(seed)),
        ]
    )
    if summary.spreads:
        click.echo()
        rows = [(name, *map(seconds, asdict(s).values())) for name, s in summary.spreads.items()]
        print_table(_COLUMNS, rows)
    for name in _PLOTTED:
        if values := values_of(samples, name):
            click.echo()
            print_title(name)
            for line in histogram(values):
                click.echo(f"  {line}")


def _stated(value: Any) -> Any:
    """The value of an option as JSON."""
    if isinstance(value, LengthRange):
        return [value.least, value.most]
    return str(value) if isinstance(value, Path) else value
