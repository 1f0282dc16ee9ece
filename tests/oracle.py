"""Is the answer still right? The built-in models judge everything between a prompt and a reply.

Each session has its own document, with the same questions but different answers (`keys_seed`): one
that reads another's state, or damaged state, gives a wrong value and is caught.

    with Oracle("firn-demo", cache_nbytes=1 << 20) as oracle:
        exams = [oracle.exam(seed) for seed in range(50)]
        assert oracle.wrong(exams, rounds=2) == []
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from firn import backends
from firn.core.values import Chat, Message, Role, TextPart
from firn.demo.facts import FactSession, make_session
from firn.models.load import loader
from firn.text.prompt.maker import PromptMaker
from tests.harness import Harness, Result

MAX_REPLY = 48


def folder_of(model: str) -> Path:
    """The folder of a built-in model."""
    return Path(str(resources.files("firn.demo") / "models" / model))


@dataclass(frozen=True, slots=True)
class Exam:
    """One session to be asked about."""

    session: FactSession


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that is not the session's own."""

    exam: Exam
    question: str
    expected: str
    got: str


class Oracle(Harness):
    """The real engine on a built-in model; options are those of the harness.

    As in a server, weights are widened if there is no GPU: 16-bit products are slow on a CPU.
    """

    def __init__(self, model: str = "firn-demo", **options: Any) -> None:
        folder = folder_of(model)
        self.tokenizer = loader.load_tokenizer(folder)
        self.prompts = PromptMaker(self.tokenizer, context_length=16384)

        def build() -> Any:
            backend = backends.find()
            backend.weights.dtype = "auto"
            loaded = loader.load(folder, served_name=model, form=backend.weights)
            return loaded.model, loaded.make_layers

        super().__init__(build, **{"chunk": 256, "block": 64, **options})

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def exam(self, seed: int, *, n_facts: int = 12, keys_seed: int | None = 1) -> Exam:
        """A session with the same questions as every other, and its own answers."""
        session = make_session(
            seed,
            n_facts=n_facts,
            n_questions=6,
            keys_seed=keys_seed,
            kinds=("fact",),
            placement="system",
        )
        return Exam(session)

    def put(self, exam: Exam, n: int) -> Result:
        """Ask question n, in the background."""
        prompt = self.prompts.make(_chat(exam.session.messages(n)))
        return self.submit(
            prompt.ids,
            MAX_REPLY,
            boundaries=prompt.boundaries,
            eos=self.tokenizer.eos,
        )

    def text(self, result: Result) -> str:
        """Waits for the reply and returns it."""
        result.wait()
        if result.error:
            raise result.error
        kept = [t for t in result.reply if t not in self.tokenizer.eos]
        return self.tokenizer.decode(kept)

    def wrong(
        self, exams: Sequence[Exam], *, rounds: int = 1, first: int = 0, at_once: int = 8
    ) -> list[Wrong]:
        """Ask every exam `rounds` questions, interleaved and in batches; returns the wrong answers."""
        found: list[Wrong] = []
        for n in range(first, first + rounds):
            for i in range(0, len(exams), at_once):
                asked = [(exam, self.put(exam, n)) for exam in exams[i : i + at_once]]
                for exam, result in asked:
                    question = exam.session.questions[n]
                    got = self.text(result)
                    if got != question.answer:
                        found.append(Wrong(exam, question.text, question.answer, got))
        return found


def _chat(messages: Sequence[dict[str, str]]) -> Chat:
    roles: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
    return Chat(tuple(Message(roles[m["role"]], (TextPart(m["content"]),)) for m in messages))
