"""How commands write to the terminal."""

from __future__ import annotations

import pytest

from firn.cli.terminal import bytes_progress, steps_progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_drawn_only_if_stderr_is_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):  # either makes rich see a terminal
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with steps_progress("playing", total=3) as show:
        show(1, 3)
    assert bool(capsys.readouterr().err) == is_terminal, "not even an empty line"
    with bytes_progress("verifying", 3) as advance:
        advance(1)
    assert bool(capsys.readouterr().err) == is_terminal
