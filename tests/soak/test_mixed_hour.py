"""An hour's worth of one request a second, sent as fast as possible: every API, every kind of end,
flat memory."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from firn.demo.facts import FactSession
from firn.demo.server import ServerProcess
from tests.soak.house import (
    N_QUESTIONS,
    House,
    always_healthy,
    ask,
    at_once,
    held_by,
    let_go_of_everything,
    sessions,
)
from tests.soak.test_disconnects import vanish

N_REQUESTS = 3600
N_CLIENTS = 4
N_ROUNDS = 8
"""After each round the server rests and is measured."""
N_EACH = N_REQUESTS // N_CLIENTS // N_ROUNDS
N_SESSIONS = 40
WEATHER = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}


class Caller:
    """One client, with its own random numbers. Answers are checked as far as possible."""

    def __init__(self, server: ServerProcess, talks: list[FactSession], number: int) -> None:
        self._server = server
        self._talks = talks
        self._rng = random.Random(number)
        self._client = httpx.Client(base_url=server.url, timeout=120)
        self.done: Counter[str] = Counter()
        self._works = {
            self._question: 10, self._stream: 6, self._messages: 3, self._response: 3,
            self._choices: 2, self._structured: 2, self._tools: 1, self._tokens: 2, self._cache: 1,
            self._bad: 2, self._gone: 3, self._long: 1,
        }  # fmt: skip

    def call(self, n: int) -> Counter[str]:
        for _ in range(n):
            (work,) = self._rng.choices(list(self._works), list(self._works.values()))
            work()
            self.done[work.__name__] += 1
        return self.done

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, body: Any, *, status: int = 200) -> Any:
        answer = self._client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def _asked(self) -> tuple[FactSession, int]:
        return self._rng.choice(self._talks), self._rng.randrange(N_QUESTIONS)

    def _question(self) -> None:
        talk, n = self._asked()
        assert ask(self._server.url, talk, n, client=self._client).right

    def _stream(self) -> None:
        talk, n = self._asked()
        body = {"messages": talk.messages(n), "temperature": 0, "max_tokens": 64, "stream": True}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"

    def _messages(self) -> None:
        talk, n = self._asked()
        system, *rest = talk.messages(n)
        body = {"system": system["content"], "messages": rest, "max_tokens": 64, "temperature": 0}
        (block,) = self._post("/v1/messages", body)["content"]
        assert block["text"] == talk.questions[n].answer

    def _response(self) -> None:
        first = self._post("/v1/responses", {"input": "Hello!", "max_output_tokens": 8})
        more = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 8}
        self._post("/v1/responses", more)
        assert self._client.delete(f"/v1/responses/{first['id']}").status_code == 200

    def _choices(self) -> None:
        body = {"prompt": "Snow that ", "n": 3, "max_tokens": 12, "seed": self._rng.randrange(99)}
        assert len(self._post("/v1/completions", body)["choices"]) == 3

    def _structured(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
        talk, n = self._asked()
        body = {"messages": talk.messages(n), "response_format": form, "max_tokens": 64}
        self._post("/v1/chat/completions", body)

    def _tools(self) -> None:
        tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
        body = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "max_tokens": 8}
        answer = self._client.post("/v1/chat/completions", json=body)
        assert answer.status_code in (200, 400), answer.text

    def _tokens(self) -> None:
        text = "words " * self._rng.randrange(1, 3000)
        ids = self._post("/v1/tokenize", {"text": text})["ids"]
        assert self._post("/v1/detokenize", {"ids": ids})["text"] == text

    def _cache(self) -> None:
        talk, n = self._asked()
        body = {"messages": talk.messages(n)}
        for path in ("probe", "pin", "unpin"):
            self._post(f"/v1/cache/{path}", body)
        assert self._client.get("/v1/cache/stats").status_code == 200
        assert self._client.get("/metrics").status_code == 200

    def _bad(self) -> None:
        bad: list[Any] = [
            {},
            {"messages": []},
            {"messages": [{"role": "user", "content": 5}]},
            {"messages": [{"role": "user", "content": "a"}], "temperature": "hot"},
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"range": 1}},
            {"messages": [{"role": "user", "content": "a" * 900_000}]},
        ]
        self._post("/v1/chat/completions", self._rng.choice(bad), status=400)

    def _gone(self) -> None:
        talk, n = self._asked()
        body = {"messages": talk.messages(n), "stream": True, "max_tokens": 400, "input": "a"}
        vanish(self._server.port, self._rng, body)

    def _long(self) -> None:
        """A new document of a few thousand tokens."""
        talk = sessions(1, n_facts=150, first=self._rng.randrange(1000))[0]
        body = {"messages": talk.messages(0), "max_tokens": 4, "temperature": 0}
        self._post("/v1/chat/completions", body)


@pytest.mark.soak
def test_an_hour_of_everything(tmp_path: Path) -> None:
    talks = sessions(N_SESSIONS)
    with House(tmp_path) as house:
        server = house.start(
            "--cache-memory-mb", "4", "--cache-block-tokens", "32", "--ssd-cache-max-gb", "0.02"
        )
        done: Counter[str] = Counter()
        seen = []
        with always_healthy(server):
            for turn in range(N_ROUNDS + 1):
                callers = [Caller(server, talks, 10 * turn + k) for k in range(N_CLIENTS)]
                for counted in at_once(N_CLIENTS, lambda k, who=callers: who[k].call(N_EACH)):
                    done += counted
                for caller in callers:
                    caller.close()
                let_go_of_everything(server)
                seen.append(held_by(server))
        print(f"{sum(done.values())} requests: {dict(done)}", *seen, sep="\n")
        assert sum(done.values()) >= N_REQUESTS
        assert len(done) == 12, done
        warm = seen[1:]  # the first round includes what is loaded only once
        half = len(warm) // 2
        early = statistics.fmean(h.rss_mib for h in warm[:half])
        late = statistics.fmean(h.rss_mib for h in warm[half:])
        assert late < early * 1.08 + 16, [round(h.rss_mib) for h in seen]
        assert max(h.n_files for h in warm) <= warm[0].n_files + 3
        assert max(h.n_threads for h in warm) <= warm[0].n_threads + 2
        assert all(ask(server.url, talk, 0).right for talk in talks[:5])
        assert server.stop() == 0
    assert "Traceback" not in house.log()
    assert " 500 " not in house.log()
