"""What each agent does: its commands, and the replies that the model is forced to give."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAIN, SUB = "[main]", "[sub]"
LONG = "word " * 6000
ASK = f"{MAIN} Look at the files here, one after the other."


@dataclass(frozen=True)
class Turn:
    """One run of the agent. before: changes the project first. cut: killed during the reply."""

    name: str
    command: Sequence[str]
    replies: Mapping[str, Sequence[str]]
    before: Callable[[Path], object] | None = None
    cut: bool = False


@dataclass(frozen=True)
class Agent:
    """env: in addition to a HOME of its own. files: by path, in the home (~/) or in the project.
    needs: a text that is in the prompts of its conversations, but not in those for titles.
    rearranges: it moves earlier text to other places, so that a prompt does not continue where the
    last one ended."""

    turns: Sequence[Turn]
    rearranges: bool = False
    needs: str = "<tools>"
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model's template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def project(folder: Path) -> None:
    """Writes what the agents look at: two texts and a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text("The first file.\n")
    (folder / "b.txt").write_text("The second file.\n")
    rows = b"".join(b"\0" + bytes([200, 30, 30]) * 8 for _ in range(8))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    picture = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        picture += struct.pack(">I", len(data)) + kind + data
        picture += struct.pack(">I", zlib.crc32(kind + data))
    (folder / "pic.png").write_bytes(picture)


def touch(folder: Path) -> None:
    """Changes a file: agents that watch files remind the model of it."""
    (folder / "a.txt").write_text("The first file, changed by somebody else.\n")


# --- the agents ----------------------------------------------------------------------------


def claude(binary: str, folder: Path, settings: str) -> Agent:
    """settings: what `firn agents claude` prints."""
    lines = (line.removeprefix("export ") for line in settings.splitlines())
    env = {name: value.strip("'") for name, value in (line.split("=", 1) for line in lines)}

    def ask(prompt: str, *flags: str) -> list[str]:  # the list of tools swallows what follows it
        shown = ["--output-format", "json"]
        return [binary, "-p", prompt, *flags, *shown, "--allowedTools", "Read,Bash,Agent"]

    def go_on(prompt: str) -> list[str]:
        return ask(prompt, "--continue")

    read = [call("Read", file_path=str(folder / name)) for name in ("a.txt", "b.txt", "pic.png")]
    helper = call(
        "Agent", description="Look", prompt=f"{SUB} Look at a.txt.", subagent_type="general-purpose"
    )
    steps = [read[0], call("Bash", command="ls", description="List"), read[1], "Three steps."]
    return Agent(
        env=env,
        turns=(
            Turn("three tools", ask(ASK), {MAIN: steps}),
            Turn(
                "sub-agent",
                go_on("Let a helper look."),
                {MAIN: [helper, "It has looked."], SUB: [read[0], read[1], "Looked."]},
            ),
            Turn("reminder", go_on("Go on."), {MAIN: [read[1], "Gone on."]}, before=touch),
            Turn("picture", go_on("See the picture."), {MAIN: [read[2], "Seen."]}),
            Turn("cut", go_on("Tell a long story."), {MAIN: [LONG]}, cut=True),
            Turn("after the cut", go_on("Never mind."), {MAIN: [read[0], "All right."]}),
        ),
    )


def codex(binary: str, folder: Path, settings: str) -> Agent:
    run = [binary, "exec", "--json", "--skip-git-repo-check"]
    sandbox = ["-s", "read-only"]
    again = [binary, "exec", "resume", "--last", "--json", "--skip-git-repo-check"]
    shell = [call("exec_command", cmd=cmd) for cmd in ("cat a.txt", "ls", "cat b.txt")]
    helper = call("multi_agent_v1__spawn_agent", message=f"{SUB} Look at a.txt.")
    look = call("view_image", path=str(folder / "pic.png"))
    widen = [
        "-c",
        'sandbox_mode="workspace-write"',
    ]  # adds a developer message in mid-conversation
    return Agent(
        files={"~/.codex/config.toml": settings},
        turns=(
            Turn("three tools", [*run, *sandbox, ASK], {MAIN: [*shell, "Three steps."]}),
            Turn("reminder", [*again, *widen, "Go on."], {MAIN: [shell[2], "Gone on."]}),
            Turn("picture", [*again, "See the picture."], {MAIN: [look, "Seen."]}),
            Turn("cut", [*again, "Tell a long story."], {MAIN: [LONG]}, cut=True),
            Turn("after the cut", [*again, "Never mind."], {MAIN: [shell[0], "All right."]}),
            Turn(  # at the end: a helper that outlives the turn becomes the --last conversation
                "sub-agent",
                [*again, "Let a helper look."],
                {MAIN: [helper, shell[1], "It looks."], SUB: [shell[0], "Looked."]},
            ),
        ),
    )


def opencode(binary: str, folder: Path, settings: str) -> Agent:
    run = [binary, "run", "--format", "json"]
    again = [*run, "--continue"]
    read = [call("read", filePath=str(folder / name)) for name in ("a.txt", "b.txt", "pic.png")]
    helper = call(
        "task", description="Look", prompt=f"{SUB} Look at a.txt.", subagent_type="general"
    )
    steps = [read[0], call("bash", command="ls"), read[1], "Three steps."]
    return Agent(
        files={"opencode.json": settings},
        turns=(
            Turn("three tools", [*run, ASK], {MAIN: steps}),
            Turn(
                "sub-agent",
                [*again, "Let a helper look."],
                {MAIN: [helper, "It has looked."], SUB: [read[0], read[1], "Looked."]},
            ),
            Turn("reminder", [*again, "Go on."], {MAIN: [read[1], "Gone on."]}, before=touch),
            Turn("picture", [*again, "See the picture."], {MAIN: [read[2], "Seen."]}),
            Turn("cut", [*again, "Tell a long story."], {MAIN: [LONG]}, cut=True),
            Turn("after the cut", [*again, "Never mind."], {MAIN: [read[0], "All right."]}),
        ),
    )


def aider(binary: str, folder: Path, settings: str) -> Agent:
    """aider has no tools: it edits, runs the tests and reports them to the model, three times."""
    parts = settings.split("<<'END'\n")
    metadata, rest = parts[1].split("\nEND\n", 1)[0], parts[2].split("\nEND\n", 1)
    words = rest[1].split()
    flags = ["--no-check-update", "--no-analytics", "--yes-always", "--no-git", "--no-pretty"]
    flags += ["--no-show-model-warnings", "--no-auto-lint", "--restore-chat-history"]
    run = [binary, *words[1:], *flags, "--file", "a.txt"]
    tests = ["--auto-test", "--test-cmd", "echo not yet; false"]
    edits = [f"a.txt\n```\nVersion {i} of the file.\n```" for i in range(8)]
    return Agent(
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # otherwise it downloads prices
        needs="",
        rearranges=True,  # the files' contents come after the whole conversation
        files={".aider.model.metadata.json": metadata, ".aider.model.settings.yml": rest[0]},
        turns=(
            Turn("three tests", [*run, *tests, "--message", ASK], {MAIN: edits}),
            Turn("next question", [*run, "--message", f"{MAIN} And now?"], {MAIN: ["Fine."]}),
            Turn("cut", [*run, "--message", f"{MAIN} Tell a story."], {MAIN: [LONG]}, cut=True),
            Turn("after the cut", [*run, "--message", f"{MAIN} Go on."], {MAIN: ["All right."]}),
        ),
    )


AGENTS: Mapping[str, Callable[[str, Path, str], Agent]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "aider": aider,
}
