"""Real agents against a live firn server: what does each turn compute?

    bash benchmarks/agents/setup.sh                                # once: the agents; some minutes, 2 GB
    .venv/bin/python benchmarks/agents/run.py [claude codex opencode aider]

Starts `server.py` (firn on a tiny random model with forced replies), gives each agent the settings
that `firn agents` prints, a home and a project of its own, and lets it work: three tool steps, a
sub-agent, a reminder in mid-conversation, a picture in a tool result, an interrupted turn and the
turn after it. For each prompt of the conversation, the table shows the server's own figures (from
its log line) and how much of it was new:

    prompt    tokens of the prompt
    cached    tokens that were taken from the cache
    computed  the rest
    new       tokens added since the previous prompt and its reply; for an agent that rearranges its
              prompts (aider), all that follow the longest prefix shared with an earlier prompt and
              its reply

If `computed` exceeds `new` by more than a few tokens, work was done twice, and the line ends with
the server's reason.

All four agents take about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scenarios
from scenarios import MAIN, Agent, Turn

HERE = Path(__file__).parent
PORT = 8431
URL = f"http://127.0.0.1:{PORT}"
SLACK_TOKENS = 32
"""The last token is always computed, and a reply's end may be tokenised differently."""
CUT_AFTER_S = 2.0
TURN_S = 600.0
LINE = re.compile(r"(req_\w+) POST (\S+) (\d+|-) .*?prompt=(\d+) cached=(\d+)(?: \([^)]*\))?"
                  r"(?: why=\"([^\"]*)\")? reply=(\d+)(.*)")  # fmt: skip


@dataclass(frozen=True)
class LoggedRequest:
    """One request as the server logged it."""

    status: str
    prompt: int
    cached: int
    why: str
    reply: int
    rest: str

    @property
    def known(self) -> int:
        """Tokens of the next prompt that this one computed; a reply that was cut off is lost."""
        return self.prompt + (0 if "client gone" in self.rest else self.reply)


def lab_folder() -> Path:
    return Path(os.environ.get("FIRN_LAB", f"{tempfile.gettempdir()}/firn-lab")) / "agents"


@contextmanager
def serving(folder: Path, script: Path, *, template: Path | None) -> Iterator[Path]:
    """Runs the server; yields its log."""
    log = folder / "firn.log"
    command = [sys.executable, str(HERE / "server.py"), "--folder", str(folder)]
    command += ["--script", str(script), "--port", str(PORT), "--no-ssd-cache"]
    command += ["--prefill-chunk", "1024"]
    command += ["--template", str(template)] if template else []
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"{URL}/ready").close()
                break
            except OSError:
                time.sleep(0.2)
        if server.poll() is not None:
            sys.exit(f"the server did not start: see {log}")
        yield log
    finally:
        server.terminate()
        server.wait()


def settings_for(agent: str) -> str:
    command = [sys.executable, "-m", "firn", "agents", agent, "--url", URL]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Place:
    """Where one agent works."""

    agent: str
    home: Path
    project: Path
    env: dict[str, str]
    needs: str
    script: Path
    jobs: Path


def run_turn(turn: Turn, place: Place) -> int | None:
    """Runs one turn of the agent. Returns its exit code, None if it was cut off."""
    name = f"{place.agent} {turn.name}"
    place.script.write_text(json.dumps({"turn": name, "needs": place.needs, **turn.replies}))
    if turn.before is not None:
        turn.before(place.project)
    with (place.home / f"{turn.name}.out".replace(" ", "-")).open("wb") as out:
        process = subprocess.Popen(
            turn.command,
            cwd=place.project,
            env=place.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if not turn.cut:
                return process.wait(TURN_S)
            while process.poll() is None and f'"{name}", "mark": "{MAIN}"' not in read(place.jobs):
                time.sleep(0.1)
            time.sleep(CUT_AFTER_S)
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the agent has a process group of its own
                process.wait()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def logged(log: Path) -> dict[str, LoggedRequest]:
    seen = {}
    for match in LINE.finditer(read(log)):
        request, _, status, prompt, cached, why, reply, rest = match.groups()
        seen[request] = LoggedRequest(
            status, int(prompt), int(cached), why or "", int(reply), rest.strip()
        )
    return seen


def show(agent: str, jobs: Path, log: Path, *, rearranges: bool) -> int:
    """Prints the table of one agent. Returns how many prompts computed more than was new."""
    seen = logged(log)
    n_more = 0
    last: dict[str, LoggedRequest] = {}
    """By mark: the previous prompt of that conversation."""
    for line in read(jobs).splitlines():
        job: dict[str, Any] = json.loads(line)
        turn, mark = str(job["turn"]).removeprefix(f"{agent} "), job["mark"]
        if not mark or turn == job["turn"] or job["request"] not in seen:
            continue
        now, before = seen[job["request"]], last.get(mark)
        known = int(job["shared"]) if rearranges else before.known if before else 0
        computed, new = now.prompt - now.cached, max(now.prompt - known, 0)
        more = before is not None and computed > new + SLACK_TOKENS
        n_more += more
        print(
            f"{agent:9}{turn:16}{mark:7}{job['reply']:3}{now.prompt:9,}{now.cached:9,}"
            f"{computed:10,}{new:8,}  {f'MORE: {now.why}' if more else 'ok'}"
        )
        last[mark] = now
    return n_more


def work(agent: str, *, binary: str, folder: Path, script: Path) -> Agent:
    home, project = folder / agent / "home", folder / agent / "project"
    shutil.rmtree(folder / agent, ignore_errors=True)
    home.mkdir(parents=True)
    scenarios.project(project)
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    doing = scenarios.AGENTS[agent](binary, project, settings_for(agent))
    for name, text in doing.files.items():
        path = home / name[2:] if name.startswith("~/") else project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    env = {**kept, "HOME": str(home), "PWD": str(project), **doing.env}  # one of them uses PWD
    place = Place(agent, home, project, env, doing.needs, script, folder / "jobs.jsonl")
    for turn in doing.turns:
        code = run_turn(turn, place)
        if code:
            print(f"{agent}: {turn.name} ended with {code}: see {home}", file=sys.stderr)
    return doing


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("agents", nargs="*", help="which ones (default: all)")
    options.add_argument(
        "--lab", type=Path, default=lab_folder(), help="where setup.sh has put them"
    )
    options.add_argument(
        "--template", type=Path, help="a chat template in the place of the built-in models'"
    )
    args = options.parse_args()
    folder = args.lab / "run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.jsonl").unlink(missing_ok=True)
    script = folder / "script.json"
    script.write_text(json.dumps({"turn": "start", "needs": ""}))
    binaries = {}
    for name in args.agents or scenarios.AGENTS:
        path = args.lab / ("aider/bin/aider" if name == "aider" else f"node_modules/.bin/{name}")
        if not path.exists():
            sys.exit(f"there is no {path}: run benchmarks/agents/setup.sh first")
        binaries[name] = str(path)
    with serving(folder, script, template=args.template) as log:
        print("agent    turn            who  reply  prompt   cached  computed     new", flush=True)
        n_more = 0
        for name, binary in binaries.items():
            doing = work(name, binary=binary, folder=folder, script=script)
            n_more += show(name, folder / "jobs.jsonl", log, rearranges=doing.rearranges)
    print(f"{n_more} prompts computed more than was new; prompts and logs are in {folder}")


if __name__ == "__main__":
    main()
