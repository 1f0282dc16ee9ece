"""The tool that resolves firn for Macs, with a stand-in for uv."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tools import macos_wheels

UV = f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
assert words[:2] == ["pip", "compile"]
assert words[words.index("--python-platform") + 1] == "aarch64-apple-darwin"
assert words[words.index("--only-binary") + 1] == ":all:"
assert os.environ["MACOSX_DEPLOYMENT_TARGET"] == "14.0"
if words[-2:] == ["--extra", "s3"] and words[words.index("--python-version") + 1] == "3.14":
    sys.exit("no wheels for boto3")
print("mlx==0.32.4\\nmlx-lm==0.32.2")
"""


def test_what_a_mac_cannot_install_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert macos_wheels.main(["--python", "3.11"]) == 0
    assert "Python 3.11, [vision]: 2 wheels" in capsys.readouterr().out
    assert macos_wheels.main(["--python", "3.13", "3.14"]) == 1
    told = capsys.readouterr()
    assert "Python 3.13, [s3]: 2 wheels" in told.out
    assert told.err.strip() == "not installable: Python 3.14, [s3]\nno wheels for boto3"


def test_every_extra_is_tried_but_those_for_other_systems() -> None:
    extras = macos_wheels.extras((macos_wheels.ROOT / "pyproject.toml").read_text())
    assert {"vision", "dev", "s3"} <= set(extras)
    assert "cuda13" not in extras
