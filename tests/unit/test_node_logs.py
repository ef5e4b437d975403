"""Logs: one line per event, with who speaks; floods held back."""

import logging

import orjson
import pytest
import structlog
from kvferry_node.logs import Throttle, get_logger, setup_logging
from kvferry_proto.nodes import NodeRef


@pytest.fixture
def logged(capsys):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    structlog.reset_defaults()


def test_json_lines_say_who_speaks(logged):
    setup_logging("info", "json", NodeRef("d1", 255), "decoder")
    log = get_logger()
    log.debug("unseen")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        log.info("seen", pages=3, odd=object)
    try:
        raise RuntimeError("kaput")
    except RuntimeError as error:
        log.error("failed", exc_info=error)
    logging.getLogger("uvicorn.error").warning("from %s", "outside")
    logging.getLogger("uvicorn.error").info("chatter")
    seen, failed, outside = map(orjson.loads, logged().splitlines())
    assert seen["event"] == "seen"
    assert (seen["node"], seen["incarnation"], seen["role"]) == ("d1", "ff", "decoder")
    assert (seen["request_id"], seen["pages"], seen["level"]) == ("r1", 3, "info")
    assert "kaput" in failed["exception"]
    assert (outside["event"], outside["node"], outside["level"]) == ("from outside", "d1", "warning")


def test_console_lines_are_for_people(logged):
    setup_logging("debug", "console", NodeRef("d1", 255), "decoder")
    get_logger().debug("hello", pages=3)
    text = logged()
    assert "hello" in text
    assert "pages=3" in text


def test_throttle_lets_one_of_a_kind_through_and_counts_the_rest(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvferry_node.logs.time.monotonic", lambda: now[0])
    throttle = Throttle(1.0)
    assert throttle.passes("a") == 0
    assert [throttle.passes("a") for _ in range(5)] == [None] * 5
    assert throttle.passes("b") == 0
    now[0] += 1.0
    assert throttle.passes("a") == 5
    assert throttle.passes("a") is None
