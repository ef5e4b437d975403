"""docs/architecture.md lists every metric and every time that can be set, as the code has them."""

import re
from pathlib import Path

import pytest
from kvferry_decoder.settings import DecoderSettings
from kvferry_engine.worker_metrics import WorkerMetrics
from kvferry_node.metrics import NodeMetrics
from kvferry_node.settings import fields
from kvferry_prefiller.settings import PrefillerSettings
from kvferry_router.metrics import RouterMetrics
from kvferry_router.settings import RouterSettings
from prometheus_client import CollectorRegistry

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def metrics():
    registry = CollectorRegistry()
    NodeMetrics(registry)
    RouterMetrics(registry)
    WorkerMetrics(registry, lambda: None)
    return sorted((metric.name, tuple(labels(registry, metric.name))) for metric in registry.collect())


def labels(registry, name):
    collector = next(each for names, each in registry._names_to_collectors.items() if names == name)
    return collector._labelnames


def documented():
    rows = re.findall(r"^\| `(kvferry_\w+)` \| ([\w, ]*?) ?\|", PAGE, re.MULTILINE)
    return sorted((name, tuple(label.strip() for label in row.split(",") if label.strip())) for name, row in rows)


def test_the_table_of_metrics_is_complete_and_right():
    assert documented() == metrics()


@pytest.mark.parametrize("struct", [RouterSettings, PrefillerSettings, DecoderSettings])
def test_every_time_is_in_the_table_with_its_default(struct):
    for field in fields(struct):
        if field.name.endswith("_seconds"):
            pattern = rf"^\| .*\| `{field.flag}` \| {field.default:g} s \|$"
            assert re.search(pattern, PAGE, re.MULTILINE), f"{field.flag} {field.default:g} s"
