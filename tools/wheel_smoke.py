"""Build the wheel, install it alone into a fresh environment, and use it there as a user would.

    python tools/wheel_smoke.py [--keep FOLDER]

`python -m build` makes a source archive and, from that, the wheel, which must contain the files
that are not code. A new virtual environment outside the tree gets the wheel, with its dependencies
from the package index, and nothing else. There: `firn --version`, `firn doctor`, a server on the
built-in model, one chat, a restart, the same chat from the cache. Needs Python 3.11 or newer and a
package index.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXTRA = "" if platform.system() == "Darwin" else "[cpu]"
START_S, STOP_S = 120.0, 60.0
MUST_HAVE = (
    "firn/py.typed",
    "firn/dashboard/index.html",
    "firn/dashboard/app.js",
    "firn/dashboard/style.css",
    "firn/dashboard/vendor/htm-preact.js",
    "firn/dashboard/vendor/LICENSE-htm.txt",
    "firn/dashboard/vendor/LICENSE-preact.txt",
    "firn/demo/models/firn-demo/model.safetensors",
    "firn/demo/models/firn-demo/tokenizer.json",
    "firn/demo/models/firn-demo-hybrid/model.safetensors",
    "{info}/licenses/LICENSE",
    "{info}/licenses/src/firn/dashboard/vendor/LICENSE-htm.txt",
    "{info}/licenses/src/firn/dashboard/vendor/LICENSE-preact.txt",
    "{info}/entry_points.txt",
)
FACTS = " ".join(f"The badge number of Dana Okoro{n} is {4100 + 7 * n}." for n in range(60))
QUESTION = "What is the badge number of Dana Okoro7?"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keep", type=Path, help="put the source archive and the wheel here, too")
    keep: Path | None = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="firn-wheel-") as tmp:
        work = Path(tmp)
        wheel = build(work)
        info = check_files(wheel)
        say(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB, {len(MUST_HAVE)} files looked for")
        bin_folder = install(work, wheel)
        use(work, bin_folder, version=info.removesuffix(".dist-info").split("-")[1])
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            for file in (work / "dist").iterdir():
                (keep / file.name).write_bytes(file.read_bytes())
    say("the wheel stands alone")
    return 0


def build(work: Path) -> Path:
    """The wheel, made from the source archive, not from the tree."""
    python = environment(work / "builder")
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "build")
    run(python, "-m", "build", "--outdir", str(work / "dist"), str(ROOT), quiet=True)
    (wheel,) = (work / "dist").glob("*.whl")
    return wheel


def check_files(wheel: Path) -> str:
    """Checks the wheel's contents. Returns the name of its .dist-info folder."""
    names = set(zipfile.ZipFile(wheel).namelist())
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    missing = [name for each in MUST_HAVE if (name := each.format(info=info)) not in names]
    stray = sorted({name.split("/")[0] for name in names} - {"firn", info})
    if missing or stray:
        raise SystemExit(f"{wheel.name}: missing {missing}, and {stray} should not be in it")
    return info


def install(work: Path, wheel: Path) -> Path:
    python = environment(work / "fresh")
    wanted = f"firn{EXTRA} @ {wheel.as_uri()}"
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", wanted)
    return python.parent


def use(work: Path, bin_folder: Path, *, version: str) -> None:
    firn, python = str(bin_folder / "firn"), str(bin_folder / "python")
    home = work / "home"
    home.mkdir()
    where = run(python, "-c", "import firn; print(firn.__file__)", home=home)
    if not Path(where.strip()).is_relative_to(work / "fresh"):
        raise SystemExit(f"firn was imported from {where.strip()}, not from the wheel")
    if version not in run(firn, "--version", home=home):
        raise SystemExit(f"firn --version does not say {version}")
    run(firn, "doctor", home=home)
    with server(firn, home) as url:
        browser = urllib.request.Request(f"{url}/", headers={"accept": "text/html"})
        with urllib.request.urlopen(browser, timeout=30) as page:
            if b"app.js" not in page.read():
                raise SystemExit("there is no dashboard at /")
        first, n_cached = chat(url)
        if n_cached:
            raise SystemExit(f"{n_cached} tokens were cached before anything was asked")
    with server(firn, home) as url:
        second, n_cached = chat(url)
    if second != first or not n_cached:
        raise SystemExit(
            f"after a restart: {second!r} with {n_cached} tokens cached, not {first!r}"
        )
    say(f"{first!r}, and again after a restart with {n_cached} tokens cached")


@contextmanager
def server(firn: str, home: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = home / "server.log"
    with log.open("ab") as out:
        child = subprocess.Popen(
            [firn, "serve", "firn-demo", "--port", str(port), "--ssd-cache-dir", str(home / "ssd")],
            stdout=out,
            stderr=out,
            env=clean(home),
            cwd=home,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(child, url)
        yield url
        child.send_signal(signal.SIGTERM)
        if child.wait(STOP_S) != 0:
            raise SystemExit(f"the server ended with {child.returncode}")
    except BaseException:
        print(log.read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def wait_until_ready(child: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and child.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)  # it is not listening yet
    raise SystemExit("the server did not start")


def chat(url: str) -> tuple[str, int]:
    """The reply, and the number of prompt tokens that came from the cache."""
    content = f"{FACTS}\n\n{QUESTION}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        reply: dict[str, Any] = json.load(answer)
    text = reply["choices"][0]["message"]["content"]
    return text, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def clean(home: Path | None) -> dict[str, str]:
    """An environment without the caller's Python and settings, and with `home` if it is given."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "FIRN_", "VIRTUAL_ENV", "LD_PRELOAD"))
    }
    if home is not None:
        environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    return environ


def run(program: str | Path, *arguments: str, home: Path | None = None, quiet: bool = False) -> str:
    """Returns a command's output. A command that fails ends this script with its output."""
    done = subprocess.run(
        [str(program), *arguments],
        env=clean(home),
        cwd=home or tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{program} {' '.join(arguments)}:\n{done.stdout[-3000:]}")
    if not quiet and home is None and done.stdout:
        print(done.stdout, end="")
    return done.stdout


def say(text: str) -> None:
    print(f"wheel: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
