"""Load tests: when requests start, what is measured, and statistics."""

import asyncio
import json
from itertools import islice, pairwise, repeat
from random import Random
from statistics import mean, quantiles
from xml.etree import ElementTree

import pytest

from runtime.errors import ConfigurationError
from serve_app.load_test.charts import cumulative_svg, histogram
from serve_app.load_test.measuring import (
    UNFINISHED,
    UNSENT,
    Load,
    LoadClient,
    Sample,
    run_load,
)
from serve_app.load_test.summary import summarise
from serve_app.load_test.workload import (
    LengthRange,
    arrivals,
    random_requests,
    requests_of_file,
)
from tests.unit.serve_app.load_test.fake_server import FakeServer
from tests.virtual_time import in_virtual_time

LENGTHS = LengthRange(3, 5)


def measured(server, *, count=8, concurrency=4, starts=None, max_s=1000.0, ignore_eos=False):
    ended = []

    async def work():
        async with server.client() as http:
            client = LoadClient(http, "m", ignore_eos=ignore_eos)
            load = Load(concurrency, starts, max_s)
            requests = random_requests(LENGTHS, LengthRange(6, 6), seed=1)
            return await run_load(client, requests, count, load, ended.append)

    samples = in_virtual_time(work())
    assert sorted(map(id, ended)) == sorted(map(id, samples))
    return samples


def test_times_of_an_answer_are_measured():
    server = FakeServer(first_s=1.0, gap_s=0.25, parts=3)
    (sample,) = measured(server, count=1, ignore_eos=True)
    assert sample == Sample(
        started_s=pytest.approx(0),
        first_s=pytest.approx(1.0),
        latency_s=pytest.approx(1.5),
        gaps_s=[pytest.approx(0.25)] * 2,
        prompt_tokens=7,
        answer_tokens=6,
    )
    (body,) = server.bodies
    assert body["model"] == "m" and body["max_tokens"] == 6 and body["ignore_eos"] is True
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_characters_of_an_answer_that_end_lines_elsewhere_do_not_here(character):
    """Servers need not escape them, and events end with line feeds only."""
    server = FakeServer()
    delta = json.dumps({"content": f"a{character}b"}, ensure_ascii=False)
    server.tail = f'data: {{"choices": [{{"delta": {delta}}}]}}\r\n\r\ndata: [DONE]'
    (sample,) = measured(server, count=1)
    assert sample.error is None


def test_the_number_of_concurrent_requests_is_limited():
    server = FakeServer(first_s=1.0, gap_s=0.0, parts=1)
    samples = measured(server, count=8, concurrency=4)
    assert server.most_running == 4
    assert [round(sample.started_s) for sample in samples] == [0] * 4 + [1] * 4


def test_requests_at_a_rate_do_not_wait_for_answers():
    server = FakeServer(first_s=50.0)
    samples = measured(server, count=5, concurrency=None, starts=iter([1.0, 3.0, 3.0, 7.0, 8.0]))
    assert [sample.started_s for sample in samples] == pytest.approx([1, 3, 3, 7, 8])
    assert server.most_running == 5


def test_the_schedule_is_kept_although_the_client_was_late():
    """As on a busy machine: here by 1.5 s, after it had sent the first request."""

    class StallsOnce(FakeServer):
        async def handle_async_request(self, request):
            if not self.bodies:
                asyncio.get_running_loop().skip(2.5)
            return await super().handle_async_request(request)

    due = [float(n) for n in range(1, 9)]
    samples = measured(StallsOnce(), count=8, concurrency=None, starts=iter(due))
    assert [sample.due_s for sample in samples] == due
    assert [sample.started_s for sample in samples] == pytest.approx([1, 3.5, 3.5, *due[3:]])


def test_requests_that_are_due_while_too_many_run_are_late_but_not_fewer():
    """A stall of the server is in the figures of all requests that were due during it."""
    server = FakeServer(first_s=20.0, parts=1)
    samples = measured(server, count=30, concurrency=2, starts=(float(n) for n in range(30)))
    assert [sample.due_s for sample in samples] == list(range(30))
    late = [sample.started_s - sample.due_s for sample in samples]
    assert late == pytest.approx([18.0 * (n // 2) for n in range(30)])
    summary = summarise(samples)
    assert summary.due_per_s == pytest.approx(30 / 29)
    assert summary.spreads["late start"].most == pytest.approx(252.0)
    assert summary.spreads["first token"].most == pytest.approx(20.0)


def test_requests_that_were_due_and_never_sent_are_counted():
    server = FakeServer(first_s=20.0, parts=1)
    samples = measured(
        server, count=30, concurrency=2, starts=(float(n) for n in range(30)), max_s=9.5
    )
    assert summarise(samples).errors == {UNFINISHED: 2, UNSENT: 8}


def test_starts_are_those_of_a_poisson_process():
    starts = list(islice(arrivals(4.0, seed=3), 20_000))
    assert starts == list(islice(arrivals(4.0, seed=3), 20_000))
    assert starts[:9] != list(islice(arrivals(4.0, seed=4), 9))
    delays = [starts[0], *(after - before for before, after in pairwise(starts))]
    # Exponential: the standard deviation is the mean, and half are below mean times ln 2.
    assert mean(delays) == pytest.approx(1 / 4, rel=0.03)
    assert mean((d - 1 / 4) ** 2 for d in delays) ** 0.5 == pytest.approx(1 / 4, rel=0.05)
    assert quantiles(delays, n=2)[0] == pytest.approx(0.6931 / 4, rel=0.05)


def test_requests_that_run_at_the_end_of_the_time_are_cancelled():
    server = FakeServer(first_s=1.0, gap_s=0.25, parts=100)
    samples = measured(server, count=9, concurrency=2, max_s=10.0)
    assert [sample.error for sample in samples] == [UNFINISHED] * 2
    assert all(sample.latency_s == pytest.approx(10.0) for sample in samples)
    assert server.cancelled == 2 and server.running == 0
    assert summarise(samples).errors == {UNFINISHED: 2}
    assert measured(FakeServer(), count=1, starts=repeat(99.0), max_s=10.0) == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"status": 429}, "status 429: too many"),
        ({"tail": ""}, "the stream ended early"),
        ({"tail": 'data: {"error": {"message": "it broke"}}\n\n'}, "it broke"),
        ({"tail": "data: {\n\n"}, "the stream is not that of a chat completion"),
        ({"tail": "data: [1]\n\n"}, "the stream is not that of a chat completion"),
        ({"tail": 'data: {"choices": [1]}\n\n'}, "the stream is not that of a chat completion"),
    ],
)
def test_errors_are_counted(change, error):
    server = FakeServer()
    for name, value in change.items():
        setattr(server, name, value)
    summary = summarise(measured(server))
    assert summary.errors == {error: 8}
    assert (summary.complete, summary.requests, summary.spreads) == (0, 8, {})


def test_statistics():
    samples = [Sample(float(i), 0.1 * i, 2.0, [0.5, 1.5], 10, 5) for i in range(11)]
    samples.append(Sample(0.0, 9.0, 3.0, [9.0], 70, 80, "broken"))
    summary = summarise(samples)
    assert (summary.requests, summary.complete, summary.seconds) == (12, 11, 12.0)
    assert summary.requests_per_s == pytest.approx(11 / 12)
    assert summary.prompt_tokens_per_s == pytest.approx(110 / 12)
    assert summary.answer_tokens_per_s == pytest.approx(55 / 12)
    assert summary.due_per_s is None and "late start" not in summary.spreads
    first = summary.spreads["first token"]
    assert (first.mean, first.p50, first.p90, first.p99, first.most) == pytest.approx(
        (0.5, 0.5, 0.9, 0.99, 1.0)
    )
    assert summary.spreads["between parts"].mean == pytest.approx(1.0)
    assert summary.spreads["per token"].p50 == pytest.approx(2.0 / 4)


def test_prompts_have_the_lengths_and_are_those_of_the_seed():
    first, again, other = (
        list(islice(random_requests(LENGTHS, LengthRange(1, 9), seed), 50)) for seed in (1, 1, 2)
    )
    assert first == again != other
    texts = [request.messages[0]["content"] for request in first]
    assert {len(text.split()) for text in texts} == {3, 4, 5}
    assert {request.max_tokens for request in first} == set(range(1, 10))
    assert len(set(texts)) == 50


def test_prompts_of_a_file_are_sent_in_turn(tmp_path):
    path = tmp_path / "p.jsonl"
    messages = '[{"role": "user", "content": "b"}]'
    path.write_text(f'{{"prompt": "a", "max_tokens": 2}}\n\n{{"messages": {messages}}}\n')
    found = list(islice(requests_of_file(path, LengthRange(8, 8), 0), 3))
    assert [(r.messages[0]["content"], r.max_tokens) for r in found] == [
        ("a", 2), ("b", 8), ("a", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\nx', "line 2 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("{}", "needs either"),
        ("[1]", "needs either"),
        ('{"prompt": "a", "messages": []}', "needs either"),
        ('{"prompt": 1}', "must be a text"),
        ('{"messages": [1]}', "list of objects"),
        ('{"prompt": "a", "max_tokens": true}', "positive integer"),
        ('{"prompt": "a", "max_tokens": 0}', "positive integer"),
    ],
)
def test_wrong_files_of_prompts_are_refused(tmp_path, text, reason):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        next(requests_of_file(path, LENGTHS, 0))


@pytest.mark.parametrize("values", [[1.0], [2.0] * 9, [Random(0).random() for _ in range(999)]])
def test_histograms_count_all_values(values):
    lines = histogram(values)
    counts = [int(line.split()[-1]) for line in lines]
    assert sum(counts) == len(values)
    longest = max(lines, key=lambda line: line.count("█"))
    assert int(longest.split()[-1]) == max(counts) and longest.count("█") == 40


def test_the_svg_shows_the_cumulative_shares():
    text = cumulative_svg("<b> & co", {"first token": [0.0, 1.0, 2.0, 4.0], "x": [0.0]})
    root = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    assert "<b> & co" in [node.text for node in root.iter(f"{name}text")]
    lines = [node.get("points").split() for node in root.iter(f"{name}polyline")]
    points = [tuple(map(float, point.split(","))) for point in lines[0]]
    assert points[0] == (0, 180) and points[-1] == (260, 0)
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    assert len(lines) == 2
