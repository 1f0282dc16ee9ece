"""One line per record; text sent by a client cannot forge one."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from firn.logs import configure


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The log set-up belongs to the process, so whatever a test changed is restored."""
    root, ours, access = (logging.getLogger(n) for n in (None, "firn", "uvicorn.access"))
    before = (root.handlers[:], root.level, ours.level, access.disabled)
    for handler in before[0]:
        root.removeHandler(handler)  # `force` would close pytest's
    yield io.StringIO()
    root.handlers[:], level, ours_level, access.disabled = before
    root.setLevel(level)
    ours.setLevel(ours_level)


def test_a_line_has_time_level_and_short_name(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    logging.getLogger("firn.engine.loop").info("step %d", 3)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    engine\.loop: step 3\n", stream.getvalue()
    )


def test_a_text_never_spans_two_lines(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    logging.getLogger("firn.api").warning("model %s", "x\n2025-01-01 00:00:00 ERROR api: forged\r")
    assert stream.getvalue().count("\n") == 1
    assert r"x\n2025" in stream.getvalue()


def test_an_exception_keeps_its_traceback(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("firn.api").exception("failed")
    assert "Traceback" in stream.getvalue()
    assert stream.getvalue().endswith("ValueError: bad\n")


@pytest.mark.parametrize(
    ("level", "heard"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)]
)
def test_the_level_is_ours_alone(stream: io.StringIO, level: str, heard: int) -> None:
    configure(level, stream=stream)  # type: ignore[arg-type]
    logger = logging.getLogger("firn.x")
    for log in (logger.debug, logger.info, logger.warning, logger.error):
        log("ours")
    logging.getLogger("httpx").info("theirs")
    logging.getLogger("httpx").warning("theirs")
    assert stream.getvalue().count("ours") == heard
    assert stream.getvalue().count("theirs") == 1


def test_uvicorn_logs_no_requests(stream: io.StringIO) -> None:
    configure("debug", stream=stream)
    logging.getLogger("uvicorn.access").warning("GET /")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").error("boom")
    assert stream.getvalue().count("\n") == 1
    assert "uvicorn.error: boom" in stream.getvalue()


def test_configuring_twice_logs_once(stream: io.StringIO) -> None:
    configure("info", stream=io.StringIO())
    configure("info", stream=stream)
    logging.getLogger("firn.x").info("once")
    assert stream.getvalue().count("once") == 1
