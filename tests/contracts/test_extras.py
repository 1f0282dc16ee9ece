"""The contract of extras, over every file of assembly/extras."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from firn.api.calls.event_router import EventRouter
from firn.api.services import Services
from firn.assembly import extras
from firn.assembly.extras import Extra, find_encoder, open_extras
from firn.config import Config
from firn.core.fair_pool import FairPool
from firn.text.prompt.maker import PromptMaker
from firn.text.reply.formats import PLAIN
from tests.fakes import FakeEngine, FakeTokenizer

LATE = (
    "firn.fleet", "firn.kv_events", "firn.ranks", "firn.sparse.attention", "firn.sparse.prefill",
    "firn.traces", "msgpack", "zmq",
)  # fmt: skip
FILES = [p for p in Path(extras.__file__).parent.glob("*.py") if not p.name.startswith("_")]


def services() -> Services:
    tokenizer = FakeTokenizer()
    return Services(
        engine=FakeEngine(lambda events: None, lambda job, choice: [], vocab_size=100),
        tokenizer=tokenizer,
        prompts=PromptMaker(tokenizer, context_length=100, n_ids=100),
        reply_format=PLAIN,
        event_router=EventRouter(),
        pool=FairPool(1, name="test"),
    )


@pytest.fixture(params=open_extras(Config()), ids=lambda extra: type(extra).__name__)
def extra(request: pytest.FixtureRequest) -> Extra:
    return request.param  # type: ignore[no-any-return]


def test_with_the_settings_of_everybody_it_stands_in_nobodys_way(
    extra: Extra, tmp_path: Path
) -> None:
    """It opens no file, needs no draft model, and may be closed before there is a model."""
    extra.check()
    extra.begin()
    assert not extra.needs_draft_model
    extra.close()


def test_a_folder_that_is_not_its_own_is_left_to_others(extra: Extra, tmp_path: Path) -> None:
    for kind in ("llama", "of-which-mlx-lm-knows-nothing"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert extra.encoder(tmp_path) is None


def test_every_file_is_found_once_for_each_server() -> None:
    first, second = open_extras(Config()), open_extras(Config())
    assert len(first) == len(FILES)
    assert not {*map(id, first)} & {*map(id, second)}


def test_one_loads_what_generates_no_text() -> None:
    class Loads(Extra):
        def encoder(self, folder: Path) -> extras.LoadEncoder | None:
            return loads if folder == Path("own") else None

    def loads(spec: object, compute: object) -> extras.LoadedEncoder:
        raise AssertionError

    both = (Extra(Config()), Loads(Config()))
    assert find_encoder(both, Path("own")) is loads
    assert find_encoder(both, Path("other")) is None


def test_a_server_that_uses_none_imports_none_of_what_they_are_made_of() -> None:
    script = (
        "import sys\n"
        "import firn.app\n"
        "from firn.assembly.extras import open_extras\n"
        "from firn.config import Config\n"
        "open_extras(Config())\n"
        f"print([name for name in {LATE!r} if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[]"]
