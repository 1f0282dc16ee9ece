"""Sessions with known answers: documents of invented facts, and questions about them.

Pure functions of their seeds; no state, no dependencies. The built-in models were trained on the
"train" split of this world and are measured on the "held-out" split: every invented name and every
value belongs to exactly one split, by a hash of its text, so a held-out session contains no name
and no value that occurred in training.

    session = make_session(7, n_facts=40, n_questions=6)
    for n, question in enumerate(session.questions):
        reply = ask(session.messages(n))
        assert reply == question.answer
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from firn.demo import words

Split = Literal["train", "held-out"]
Placement = Literal["system", "message", "question"]
Kind = Literal["fact", "absent", "note", "noted", "name", "repeat", "asked", "greeting"]

KINDS: tuple[Kind, ...] = (
    "fact",  # in the document
    "absent",  # nowhere: the entity is new, or known without this attribute
    "note",  # the user adds a fact
    "noted",  # asks for a fact the user added in an earlier turn
    "name",  # the user's own name: given, asked for, or asked for without having been given
    "repeat",  # asks for the previous answer again
    "asked",  # asks what the previous message was
    "greeting",
)
ACKNOWLEDGED: frozenset[Kind] = frozenset({"note", "greeting"})
"""Kinds whose right answer does not depend on the context."""

TOKENS_PER_FACT = 15.2
"""Tokens of the built-in models that a fact takes in a document (measured mean)."""

_KIND_WEIGHTS: dict[Kind, float] = {
    "fact": 0.60,
    "absent": 0.13,
    "note": 0.05,
    "noted": 0.06,
    "name": 0.04,
    "repeat": 0.04,
    "asked": 0.04,
    "greeting": 0.04,
}
_PLACEMENTS: tuple[Placement, ...] = ("system", "message", "question")
_HELD_OUT_SHARE = 5  # one text in five


@dataclass(frozen=True, slots=True)
class Fact:
    """One attribute of one entity. Within a session (attribute, entity) is unique."""

    attribute: str
    entity: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The {self.attribute} of {self.entity} is {self.value}."


@dataclass(frozen=True, slots=True)
class Question:
    """One user turn and the one right reply to it."""

    text: str
    answer: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class FactSession:
    """A dialogue about one document. Ask the questions in order: some refer to earlier turns."""

    system: str
    document: str
    questions: tuple[Question, ...]
    placement: Placement

    def messages(self, n: int, *, replies: Sequence[str] | None = None) -> list[dict[str, str]]:
        """The chat that ends with question `n`.

        replies: one per earlier question, if a client wants its own transcript; otherwise earlier
        turns contain the right answers.
        """
        answers = [q.answer for q in self.questions[:n]] if replies is None else list(replies)
        if len(answers) != n:
            raise ValueError(f"question {n} needs {n} earlier replies, got {len(answers)}")
        chat = self._opening()
        lead = f"{self.document}\n\n" if self.placement == "question" else ""
        for question, answer in zip(self.questions, answers, strict=False):
            chat.append({"role": "user", "content": lead + question.text})
            chat.append({"role": "assistant", "content": answer})
            lead = ""
        chat.append({"role": "user", "content": lead + self.questions[n].text})
        return chat

    def _opening(self) -> list[dict[str, str]]:
        if self.placement == "system":
            return [{"role": "system", "content": f"{self.system}\n\n{self.document}"}]
        chat = [{"role": "system", "content": self.system}]
        if self.placement == "message":
            chat.append({"role": "user", "content": self.document})
            chat.append({"role": "assistant", "content": words.READ})
        return chat


def make_session(
    seed: int,
    *,
    n_facts: int = 60,
    n_questions: int = 12,
    keys_seed: int | None = None,
    kinds: Sequence[Kind] = KINDS,
    placement: Placement | None = None,
    split: Split = "held-out",
) -> FactSession:
    """The session for these seeds: the same arguments always give the same session.

    keys_seed: fixes everything but the values (default: `seed`). Two sessions that share it ask the
    same questions about the same entities but have different answers, which exposes a server that
    mixes them up. (Notes and the user's own name are values too, given in a question.) kinds: the
    turns that may occur; a kind that needs an earlier turn (noted, repeat, asked) appears once
    there is one.
    """
    keys = Random(f"firn keys {seed if keys_seed is None else keys_seed}")
    writer = _Writer(keys, Random(f"firn values {seed}"), split)
    system = keys.choice(words.SYSTEM)
    facts = [writer.new_fact() for _ in range(n_facts)]
    document = _document(keys, facts)
    questions = _dialogue(keys, writer, facts, n_questions, kinds)
    drawn = keys.choice(_PLACEMENTS)
    return FactSession(system, document, questions, placement or drawn)


def n_facts_for(n_tokens: int) -> int:
    """How many facts a document of about `n_tokens` tokens needs."""
    return max(1, round(n_tokens / TOKENS_PER_FACT))


def is_held_out(text: str) -> bool:
    """Whether a name or a value belongs to the held-out split."""
    return zlib.crc32(text.encode()) % _HELD_OUT_SHARE == 0


class _Writer:
    """Invents facts; owned by one `make_session` call. Keys and values are drawn independently."""

    def __init__(self, keys: Random, values: Random, split: Split) -> None:
        self._keys = keys
        self._values = values
        self._held_out = split == "held-out"
        self._taken: set[str] = set()
        self._names: dict[str, list[str]] = {}
        # Entities that still have unused attributes: (entity, attributes left).
        self._open: list[tuple[str, list[str]]] = []

    def new_fact(self) -> Fact:
        attribute, entity = self._new_key()
        return Fact(attribute, entity, self._value(attribute))

    def absent_fact(self) -> Fact:
        """A key that no fact has or will have; half of them name a known entity."""
        if self._keys.random() < 0.5:
            attribute, entity = self._old_entity_key() or self._new_entity_key()
        else:
            attribute, entity = self._new_entity_key()
        return Fact(attribute, entity, words.NOT_MENTIONED)

    def person(self, dice: Random) -> str:
        first = self._word(dice, words.STARTS, words.FIRST_ENDS)
        return f"{first} {self._word(dice, words.STARTS, words.LAST_ENDS)}"

    def own_name(self) -> str:
        return self.person(self._values)

    def _new_key(self) -> tuple[str, str]:
        if self._keys.random() < 0.55 and (key := self._old_entity_key()) is not None:
            return key
        return self._new_entity_key()

    def _old_entity_key(self) -> tuple[str, str] | None:
        if not self._open:
            return None
        at = self._keys.randrange(len(self._open))
        entity, attributes = self._open[at]
        attribute = attributes.pop()
        if not attributes:
            self._open[at] = self._open[-1]
            self._open.pop()
        return attribute, entity

    def _new_entity_key(self) -> tuple[str, str]:
        category = self._keys.choices(words.CATEGORIES, words.CATEGORY_WEIGHTS)[0]
        entity = self._new_entity(category)
        while entity in self._taken:
            entity = self._new_entity(category)
        self._taken.add(entity)
        attributes = list(words.ATTRIBUTES[category])
        self._keys.shuffle(attributes)
        attribute = attributes.pop()
        self._open.append((entity, attributes))
        return attribute, entity

    def _new_entity(self, category: str) -> str:
        if category == "person":
            first = self._reused("first", words.FIRST_ENDS)
            return f"{first} {self._reused('last', words.LAST_ENDS)}"
        if category == "product":
            return f"the {self._reused('brand', words.BRAND_ENDS)} {self._keys.choice(words.GOODS)}"
        if category == "place":
            return self._word(self._keys, words.STARTS, words.PLACE_ENDS)
        return f"{category} {self._word(self._keys, words.STARTS, words.BRAND_ENDS)}"

    def _reused(self, part: str, ends: Sequence[str]) -> str:
        """A part of a name; sometimes another entity's, so that keys are easy to confuse."""
        seen = self._names.setdefault(part, [])
        if seen and self._keys.random() < 0.3:
            return self._keys.choice(seen)
        seen.append(self._word(self._keys, words.STARTS, ends))
        return seen[-1]

    def _word(self, dice: Random, starts: Sequence[str], ends: Sequence[str]) -> str:
        def draw() -> str:
            middle = dice.choice(words.MIDDLES) if dice.random() < 0.5 else ""
            return dice.choice(starts) + middle + dice.choice(ends)

        return self._of_this_split(draw)

    def _value(self, attribute: str) -> str:
        dice, form = self._values, words.FORMS[attribute]
        if form == "person":
            return self.person(dice)
        if form in words.WORD_ENDS:
            return self._word(dice, words.STARTS, words.WORD_ENDS[form])
        # The unit is not hashed: a number must not change its split with its unit.
        pattern, space, unit = form.partition(" ")
        return self._of_this_split(lambda: words.fill(pattern, dice)) + space + unit

    def _of_this_split(self, draw: Callable[[], str]) -> str:
        while is_held_out(text := draw()) != self._held_out:
            pass
        return text


def _document(keys: Random, facts: Sequence[Fact]) -> str:
    """Prose in paragraphs, or sometimes a list of records."""
    if keys.random() < 0.2:
        return "\n".join(_say(words.RECORD, fact) for fact in facts)
    paragraphs: list[str] = []
    sentences: list[str] = []
    room = keys.randint(3, 8)
    for fact in facts:
        if keys.random() < 0.08:
            sentences.append(keys.choice(words.FILLER))
        sentences.append(_say(keys.choice(words.STATEMENTS), fact))
        if len(sentences) >= room:
            paragraphs.append(" ".join(sentences))
            sentences, room = [], keys.randint(3, 8)
    if sentences:
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs)


def _say(form: str, fact: Fact) -> str:
    text = form.format(a=fact.attribute, e=fact.entity, v=fact.value)
    return text[0].upper() + text[1:]


def _dialogue(
    keys: Random, writer: _Writer, facts: Sequence[Fact], n_questions: int, kinds: Sequence[Kind]
) -> tuple[Question, ...]:
    script = _Script(keys, writer, facts)
    weights = [_KIND_WEIGHTS[kind] for kind in kinds]
    turns: list[Question] = []
    while len(turns) < n_questions:
        turns.append(script.turn(keys.choices(kinds, weights)[0]))
    return tuple(turns)


class _Script:
    """Writes the turns of one dialogue, remembering what a later turn may refer to."""

    def __init__(self, keys: Random, writer: _Writer, facts: Sequence[Fact]) -> None:
        self._keys = keys
        self._writer = writer
        self._facts = facts
        self._unasked: list[Fact] = []
        self._noted: list[Fact] = []
        self._name: str | None = None
        self._last: Question | None = None

    def turn(self, kind: Kind) -> Question:
        if kind == "absent" or not self._facts:
            turn = self._ask(self._writer.absent_fact(), "absent")
        elif kind == "note":
            turn = self._note()
        elif kind == "noted" and self._noted:
            turn = self._ask(self._keys.choice(self._noted), "noted")
        elif kind == "name":
            turn = self._own_name()
        elif kind == "repeat" and self._last:
            turn = Question(self._keys.choice(words.REPEAT), self._last.answer, "repeat")
        elif kind == "asked" and self._last:
            answer = words.YOU_SAID.format(self._last.text)
            turn = Question(self._keys.choice(words.ASKED), answer, "asked")
        elif kind == "greeting":
            turn = Question(*self._keys.choice(words.GREETINGS), "greeting")
        else:
            turn = self._ask(self._next_fact(), "fact")
        # Only a plain question is repeated or quoted: a quote of a quote would be nonsense.
        self._last = turn if turn.kind in ("fact", "absent", "noted") else None
        return turn

    def _ask(self, fact: Fact, kind: Kind) -> Question:
        return Question(_say(self._keys.choice(words.QUESTIONS), fact), fact.sentence, kind)

    def _next_fact(self) -> Fact:
        if not self._unasked:
            self._unasked = list(self._facts)
            self._keys.shuffle(self._unasked)
        return self._unasked.pop()

    def _note(self) -> Question:
        fact = self._writer.new_fact()
        self._noted.append(fact)
        return Question(_say(self._keys.choice(words.NOTES), fact), words.NOTED, "note")

    def _own_name(self) -> Question:
        if self._name is None and self._keys.random() < 0.7:
            self._name = self._writer.own_name()
            text = words.MY_NAME.format(self._name)
            return Question(text, words.WELCOME.format(self._name), "name")
        answer = words.YOUR_NAME.format(self._name or words.NOT_MENTIONED)
        return Question(self._keys.choice(words.WHO_AM_I), answer, "name")
