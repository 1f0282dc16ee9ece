"""launchctl, as it answers on macOS 15 and 26: the texts are as it prints them, time is the test's.

A service that is booted out goes on until its process has ended (`stops_in_s`); for some seconds
more (`drains_in_s`) its label cannot be used again.
"""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from pathlib import Path

from firn.host.services.service import CommandResult

NOT_FOUND = 'Bad request.\nCould not find service "{label}" in domain for user gui: 501'
RUNNING = """{target} = {{
\tactive count = 1
\tpath = {path}
\ttype = LaunchAgent
\tstate = running

\tprogram = {program}
\targuments = {{
\t\t{program}
\t\t-m
\t}}

\tstdout path = {log}
\tinherited environment = {{
\t\tSSH_AUTH_SOCK => /private/tmp/com.apple.launchd.qLZ0NA5KYM/Listeners
\t}}

\tdefault environment = {{
\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin
\t}}

\tdomain = gui/501 [100005]
\tminimum runtime = 10
\texit timeout = 90
\truns = 1
\tlast exit code = (never exited)

\tresource coalition = {{
\t\tID = 1234
\t\ttype = resource
\t\tstate = active
\t\tactive count = 1
\t}}

\tpid = {pid}
\timmediate reason = speculative
\tforks = 0

\tjetsam coalition = {{
\t\tID = 1235
\t\ttype = jetsam
\t\tstate = active
\t\tpid = 1
\t}}

\tspawn type = interactive (4)
\tproperties = runatload | inferred program
}}"""
FAILING = """{target} = {{
\tactive count = 0
\tpath = {path}
\ttype = LaunchAgent
\tstate = spawn scheduled

\truns = 7
\tlast exit code = 2

\tjetsam coalition = {{
\t\tID = 1235
\t\tstate = active
\t\tpid = 1
\t}}
}}"""


class Launchctl:
    """Its `run` and its clock. A service runs as soon as it is bootstrapped."""

    def __init__(
        self,
        *domains: str,
        stops_in_s: float = 0.0,
        drains_in_s: float = 0.0,
        draining_code: int = 5,
    ) -> None:
        """domains: those that exist."""
        self.domains = domains or ("gui/501", "user/501", "system")
        self.stops_in_s = stops_in_s
        self.drains_in_s = drains_in_s
        self.draining_code = draining_code
        self.now = 0.0
        self.calls: list[tuple[str, ...]] = []
        self.running: dict[str, Path] = {}
        self.is_failing = False
        self._gone_at: dict[str, float] = {}
        self._free_at: dict[str, float] = {}

    @property
    def verbs(self) -> list[str]:
        return [call[1] for call in self.calls]

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self, command: Sequence[str]) -> CommandResult:
        self.calls.append(tuple(command))
        assert command[0] == "launchctl"
        for target, at in list(self._gone_at.items()):
            if at <= self.now:
                self.running.pop(target)
                self._gone_at.pop(target)
        verb, target = command[1], command[2]
        return getattr(self, f"_{verb}")(target, *command[3:])  # type: ignore[no-any-return]

    def _print(self, target: str) -> CommandResult:
        if target in self.domains:
            return CommandResult(0, f"{target} = {{\n\ttype = login\n\thandle = 100005\n}}")
        domain, _, label = target.rpartition("/")
        if domain not in self.domains:
            if label == "501":
                text = "Bad request.\nCould not find domain for user gui: 501"
                return CommandResult(112, text)
            return CommandResult(125, "Domain does not support specified action")
        if target not in self.running:
            return CommandResult(113, NOT_FOUND.format(label=label))
        path = self.running[target]
        plist = plistlib.loads(path.read_bytes())
        text = (FAILING if self.is_failing else RUNNING).format(
            target=target, path=path, program=plist["ProgramArguments"][0],
            log=plist["StandardOutPath"], pid=36019,
        )  # fmt: skip
        return CommandResult(0, text)

    def _bootout(self, target: str) -> CommandResult:
        if target not in self.running:
            return CommandResult(3, "Boot-out failed: 3: No such process")
        self._gone_at[target] = self.now + self.stops_in_s
        self._free_at[target] = self.now + self.stops_in_s + self.drains_in_s
        if self.stops_in_s:
            return CommandResult(36, "Boot-out failed: 36: Operation now in progress")
        self.running.pop(target)
        self._gone_at.pop(target)
        return CommandResult(0, "")

    def _bootstrap(self, domain: str, path: str) -> CommandResult:
        if domain not in self.domains:
            text = "Bootstrap failed: 125: Domain does not support specified action"
            return CommandResult(125, text)
        plist = plistlib.loads(Path(path).read_bytes())
        session = plist.get("LimitLoadToSessionType", "Aqua")
        if domain.startswith("user/") and session == "Aqua":
            return CommandResult(134, "Bootstrap failed: 134: Service cannot load in session")
        target = f"{domain}/{plist['Label']}"
        if target in self.running or self.now < self._free_at.get(target, 0.0):
            words = {5: "Input/output error", 37: "Operation already in progress"}
            code = self.draining_code
            more = "\nTry re-running the command as root for richer errors."
            return CommandResult(code, f"Bootstrap failed: {code}: {words[code]}{more}")
        self.running[target] = Path(path)
        return CommandResult(0, "")

    def _kickstart(self, target: str) -> CommandResult:
        if target not in self.running:
            text = f'Could not find service "{target.rpartition("/")[2]}" in domain'
            return CommandResult(113, text)
        text = f'Could not kickstart service "{target}": 37: Operation already in progress'
        return CommandResult(37, text)

    def _enable(self, target: str) -> CommandResult:
        return CommandResult(0, "")
