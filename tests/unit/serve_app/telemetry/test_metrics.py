"""The list of metrics: names, documents, dashboard and alerts agree."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from runtime.engine.engine_statistics import EngineStatistics
from serve_app.telemetry.exposition import merged
from serve_app.telemetry.meter import MOST_LABEL_VALUES, OTHER, LabelValues
from serve_app.telemetry.metrics import ENCODER, ENGINE, METRICS, REPLIES, Kind
from serve_app.telemetry.statistics_publisher import StatisticsPublisher
from serve_app.vision.encoder_replica import EncoderStatistics
from tests.checkout import ROOT
from tests.unit.serve_app.telemetry.recording_meter import RecordingMeter

FILES = ROOT / "configs" / "observability"
NAMED = re.compile(r"caravan_[a-z_]+")
PROMTOOL = shutil.which("promtool")
# Fields of EngineStatistics that serve routing and autoscaling only.
NOT_EXPORTED = {"kv_occupancy", "cacheable_tokens", "first_tokens_total"}


def series() -> set[str]:
    """The names under which Prometheus stores the metrics."""
    suffixes = ("_bucket", "_sum", "_count")
    return {
        f"{metric.name}{suffix}"
        for metric in METRICS
        for suffix in (suffixes if metric.kind is Kind.HISTOGRAM else ("",))
    }


def test_names_follow_the_conventions_of_prometheus():
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 30
    for metric in METRICS:
        assert NAMED.fullmatch(metric.name), metric
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), metric
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith("_seconds"), metric
        assert metric.description.endswith("."), metric


def test_the_document_lists_every_metric_with_its_labels():
    rows = re.findall(r"^\| `(caravan_\w+)` \| (\w+) \| ([^|]*)\|", document(), re.MULTILINE)
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert listed == {each.name: (each.kind.value, each.labels) for each in METRICS}


def document() -> str:
    return (ROOT / "docs" / "metrics.md").read_text()


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("expr", "query") and isinstance(item, str):
                yield item
            else:
                yield from expressions(item)
    elif isinstance(value, list):
        for item in value:
            yield from expressions(item)


def test_dashboard_and_alerts_name_exported_series_and_all_metrics_are_shown():
    board = list(expressions(json.loads((FILES / "grafana-dashboard.json").read_text())))
    alerts = list(expressions(yaml.safe_load((FILES / "alerts.yml").read_text())))
    shown = {name for text in board for name in NAMED.findall(text)}
    named = shown | {name for text in alerts for name in NAMED.findall(text)}
    assert named <= series()
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert stems == {metric.name for metric in METRICS}


with_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)"
)


def promtool(*arguments: Any) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@with_promtool
def test_promtool_accepts_the_files(tmp_path: Path):
    board = json.loads((FILES / "grafana-dashboard.json").read_text())
    queries = [text for panel in board["panels"] for text in expressions(panel)]
    rules = [
        {"record": f"panel:{index}", "expr": re.sub(r"\$__rate_interval", "5m", text)}
        for index, text in enumerate(queries)
    ]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", FILES / "alerts.yml", panels)
    promtool("check", "config", FILES / "prometheus.yml")


NODES = "caravan_nodes_unreachable"
SLOTS = 'caravan_engine_slots{model="a"}'
LOST = 'caravan_failovers_total{model="a",cause="lost"}'
OK, FULL = (f'caravan_requests_total{{status="{status}"}}' for status in (200, 503))
STOP, FAILED = (f'caravan_replies_total{{model="a",finish="{how}"}}' for how in ("stop", "failed"))
PREEMPTED = 'caravan_engine_preemptions_total{model="a",replica="%s"}'
# Several series of one failure each, the first of its process.
SCATTERED = {
    f'caravan_requests_total{{status="503",WorkerId="{n}"}}': f"_x{9 + n} 30x{20 - n}"
    for n in range(12)
}
# Series with a value for each minute (`_`: none), and the alerts of this name after some minutes.
ALERTS: dict[str, tuple[dict[str, str], str, dict[int, int]]] = {
    "idle": ({NODES: "0x30"}, "CaravanNoMetrics", {20: 0}),
    "down": ({NODES: "0x10 _x20"}, "CaravanNoMetrics", {10: 0, 30: 1}),
    "scaled to zero": ({NODES: "0x30", SLOTS: "4x10 _x20"}, "CaravanNoReplicas", {9: 0, 30: 1}),
    "first loss": ({LOST: "_x19 9x60"}, "CaravanReplicasLost", {18: 0, 19: 1, 30: 1, 40: 0}),
    "later loss": ({LOST: "1x20 9x60"}, "CaravanReplicasLost", {20: 0, 24: 1, 40: 0}),
    "not scraped": ({LOST: "9x90 _x30 9x90"}, "CaravanReplicasLost", {60: 0, 121: 0, 135: 0}),
    "errors": (
        {OK: "0+60x60", FULL: "0x20 0+6x20 120x20"},
        "CaravanServerErrors",
        {20: 0, 30: 1, 55: 0},
    ),
    "first errors": ({OK: "0+60x30"} | SCATTERED, "CaravanServerErrors", {9: 0, 18: 1}),
    "one burst": ({OK: "0+60x40", FULL: "_x19 90x20"}, "CaravanServerErrors", {20: 0, 26: 0}),
    "failing": ({STOP: "0+60x40", FAILED: "0+6x40"}, "CaravanRepliesFail", {4: 0, 20: 1}),
    "preempted": (
        {STOP: "0+6x40"} | {PREEMPTED % n: f"_x{10 + n} 9x{30 - n}" for n in range(20)},
        "CaravanPreemptions",
        {10: 0, 25: 1},
    ),
    "unloaded": ({NODES: "0x30", SLOTS: "4x10 0x20"}, "CaravanNoReplicas", {9: 0, 30: 1}),
}


@with_promtool
@pytest.mark.parametrize("case", ALERTS)
def test_alerts_fire_when_they_should(case: str, tmp_path: Path):
    series, alert, counts = ALERTS[case]
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    tested = {
        "rule_files": [str(FILES / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": v} for name, v in series.items()],
                "promql_expr_test": [
                    {
                        "expr": firing,
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"labels": "{}", "value": count}],
                    }
                    for minute, count in counts.items()
                ],
            }
        ],
    }
    cases = tmp_path / "cases.yml"
    cases.write_text(yaml.safe_dump(tested))
    promtool("test", "rules", cases)


def test_each_statistic_is_exported_or_left_out_on_purpose():
    fields = {field.name for field in dataclasses.fields(EngineStatistics)}
    assert ENGINE.keys() | NOT_EXPORTED == fields
    assert not ENGINE.keys() & NOT_EXPORTED
    encoder = {field.name for field in dataclasses.fields(EncoderStatistics)}
    assert ENCODER.keys() == encoder


def test_published_totals_are_differences_that_survive_another_engine():
    meter = RecordingMeter()
    publisher = StatisticsPublisher(meter, ENGINE, "r")
    steps = ("caravan_engine_steps_total", "a", "r")
    running = ("caravan_engine_requests_running", "a", "r")
    for statistics, total, gauge in (
        ({"a": EngineStatistics(steps_total=5, running=2)}, 5, 2),
        ({"a": EngineStatistics(steps_total=5, running=1)}, 5, 1),
        ({"a": EngineStatistics(steps_total=9)}, 9, 0),
        ({"a": EngineStatistics(steps_total=3, running=4)}, 12, 4),  # another engine
        ({}, 12, 0),
        ({"a": EngineStatistics(steps_total=4)}, 16, 0),
    ):
        publisher.publish(statistics)
        assert (meter.totals[steps], meter.gauges[running]) == (total, gauge)


def test_label_values_are_bounded():
    values = LabelValues(most=2)
    named = [values.named(REPLIES, (model, "", "stop"))["model"] for model in "abcab"]
    assert named == ["a", "b", OTHER, "a", "b"]


RAY = """\
# HELP ray_tasks Ray's own
# TYPE ray_tasks gauge
ray_tasks{State="x"} 1.0
# HELP ray_caravan_replies_total d
# TYPE ray_caravan_replies_total counter
ray_caravan_replies_total{Component="core_worker",NodeAddress="%s",SessionName="s",Version="2",\
model="a,}\\"Version=\\"b\\\\",otel_scope_name="x",otel_scope_version=""} 2.0
# HELP ray_caravan_nothing d
# TYPE ray_caravan_nothing gauge
"""


def test_the_texts_of_several_nodes_become_one():
    text = merged([RAY % "one", RAY % "two", ""])
    (family,) = text_string_to_metric_families(text)
    assert (family.name, family.type, family.documentation) == ("caravan_replies", "counter", "d")
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"NodeAddress": node, "model": 'a,}"Version="b\\'}, 2.0) for node in ("one", "two")
    ]


def exported(name: str, kind: str, *labels: str) -> str:
    head = f"# HELP ray_{name} d\n# TYPE ray_{name} {kind}\n"
    return head + "".join(f"ray_{name}{{{each}}} 1.0\n" for each in labels)


def test_counters_of_ended_replicas_are_left_out():
    live, ended = 'model="a",replica="r1"', 'model="a,replica=\\"r1\\"",replica="r0"'
    gauge = exported("caravan_engine_slots", "gauge", live)
    steps = exported("caravan_engine_steps_total", "counter", ended, live)
    shifts = exported("caravan_engine_shifts_total", "counter", ended)
    replies = exported("caravan_replies_total", "counter", 'model="a",key=""')
    text = merged([steps + shifts + replies, gauge])
    assert re.findall("^[^#].*", text, re.MULTILINE) == [
        f"caravan_engine_slots{{{live}}} 1.0",
        f"caravan_engine_steps_total{{{live}}} 1.0",
        'caravan_replies_total{model="a",key=""} 1.0',
    ]
    assert "shifts" not in text


def test_a_process_sets_its_gauges_as_long_as_it_runs():
    meter = RecordingMeter()
    publisher = StatisticsPublisher(meter, ENGINE, "r")
    publisher.publish({"a": EngineStatistics(slots=4)})
    for _ in range(2):
        meter.gauges.clear()
        publisher.publish({})
        assert meter.gauges["caravan_engine_slots", "a", "r"] == 0


def test_gauges_of_names_that_were_used_long_ago_are_not_set():
    """A process that loads models on demand may have loaded any number of them."""
    meter = RecordingMeter()
    publisher = StatisticsPublisher(meter, ENGINE, "r")
    statistics = EngineStatistics(slots=4, steps_total=1)
    last = [f"m{number}" for number in range(2 * MOST_LABEL_VALUES)]
    for name in last:
        publisher.publish({"stays": statistics, name: statistics})
    meter.gauges.clear()
    publisher.publish({"stays": statistics})
    slots = "caravan_engine_slots"
    told = [name for metric, name, _ in meter.gauges if metric == slots]
    assert set(told) == {"stays", *last[1 - MOST_LABEL_VALUES :]}
    assert meter.totals["caravan_engine_steps_total", "stays", "r"] == 1, "its total is known"
