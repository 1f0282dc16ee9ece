"""`firn cache`: names, flags and help texts. The work is in view.py and work.py.

All commands may run on a folder that servers are using; advise reads a trace instead of a folder.
Nothing heavy is imported here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firn.cli.options.parameters import (
    DEFAULT_URL,
    ApiKey,
    CacheDir,
    Command,
    ConfigFile,
    Guard,
    TraceArgument,
    Url,
    command_group,
)
from firn.config import CacheConfig, default_cache_dir, load
from firn.core.units import GIB

MAX_GIB = 1 << 20
if TYPE_CHECKING:
    from firn.cli.cache.work import CacheFolder

KeyFile = Annotated[
    str | None,
    typer.Option(
        "--ssd-cache-key-file",
        help="Key file of an encrypted cache. (env FIRN_SSD_CACHE_KEY_FILE)",
        metavar="FILE",
    ),
]
KeyText = Annotated[
    str, typer.Argument(help="A record's key; its first digits are enough.", metavar="KEY")
]


def cache_app(guarded: Guard) -> typer.Typer:
    commands: dict[str, Command] = {
        "ls": _ls,
        "show": _show,
        "where": _where,
        "stats": _stats,
        "verify": _verify,
        "gc": _gc,
        "clear": _clear,
        "export": _export,
        "import": _import,
        "advise": _advise,
    }
    return command_group(
        "Show, check, shrink, export and import the cache on disk.", commands, guarded
    )


def cache_dir(folder: str | None, config: Path | None) -> Path:
    """The cache folder of a server that is started with the same flag and file."""
    return _cache_settings(folder, config).ssd_cache_dir or default_cache_dir()


def _location(folder: str | None, config: Path | None, key_file: str | None = None) -> CacheFolder:
    """That folder, and the key that its records are encrypted with."""
    from firn.cli.cache.work import CacheFolder

    settings = _cache_settings(folder, config, key_file)
    return CacheFolder.of(
        settings.ssd_cache_dir or default_cache_dir(), settings.ssd_cache_key_file
    )


def _cache_settings(
    folder: str | None, config: Path | None, key_file: str | None = None
) -> CacheConfig:
    given = {"cache.ssd_cache_dir": folder, "cache.ssd_cache_key_file": key_file}
    flags = {key: value for key, value in given.items() if value is not None}
    return load(flags, environ=os.environ, file=config).cache


def _ls(
    folder: CacheDir = None,
    config: ConfigFile = None,
    key_file: KeyFile = None,
    top: Annotated[
        int, typer.Option(help="Prefixes to show of each model; 0 for none.", min=0, metavar="N")
    ] = 3,
) -> None:
    """List models and namespaces, and the largest prefixes of each."""
    from firn.cli.cache.view import ls

    ls(_location(folder, config, key_file), top=top)


def _show(
    key: KeyText,
    folder: CacheDir = None,
    config: ConfigFile = None,
    key_file: KeyFile = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder whose tokenizer turns tokens into text (otherwise the folder that "
            "the server used, if it still exists).",
            metavar="FOLDER",
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="Show the text from the first token on, not only this block's."
        ),
    ] = False,
) -> None:
    """Show a block: where it belongs, its layers, its tokens, and their text."""
    from firn.cli.cache.view import show

    show(_location(folder, config, key_file), key, model=model, whole=whole)


def _where(
    key: KeyText,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    folder: CacheDir = None,
    config: ConfigFile = None,
) -> None:
    """Ask a running server where a block's records are, and what may happen to them next.

    KEY is a block's key. The first digits are enough if the block is on the SSD as well.
    """
    from firn.cli.cache.view import where
    from firn.cli.client import ChatClient

    with ChatClient(url, api_key=api_key) as client:
        where(client, _location(folder, config), key)


def _stats(
    folder: CacheDir = None,
    config: ConfigFile = None,
    key_file: KeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the folder's size, records and limits."""
    from firn.cli.cache.view import show_stats

    show_stats(_location(folder, config, key_file), as_json=as_json)


def _verify(
    folder: CacheDir = None,
    config: ConfigFile = None,
    key_file: KeyFile = None,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine",
            help="Move damaged records out of the way; delete those that no prompt can reach.",
        ),
    ] = False,
) -> None:
    """Read every record and check every byte. The exit code is 1 when something is damaged."""
    from firn.cli.cache.work import verify

    raise typer.Exit(verify(_location(folder, config, key_file), quarantine=quarantine))


def _gc(
    max_gb: Annotated[
        float,
        typer.Option(
            "--ssd-cache-max-gb", help="Keep at most X GiB.", min=0, max=MAX_GIB, metavar="X"
        ),
    ],
    folder: CacheDir = None,
    config: ConfigFile = None,
) -> None:
    """Evict the least recently used prefixes, from their ends, until the rest fits."""
    from firn.cli.cache.work import gc

    gc(_location(folder, config), max_nbytes=int(max_gb * GIB))


def _clear(
    folder: CacheDir = None,
    config: ConfigFile = None,
    model: Annotated[
        str | None,
        typer.Option(help="Only this model's: its name, or the first digits of its fingerprint."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Only this namespace's: its first digits.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete records: all of them, or a model's, or a namespace's."""
    from firn.cli.cache.work import clear, to_clear
    from firn.cli.terminal import confirm

    location = _location(folder, config)
    chosen = to_clear(location, model=model, namespace=namespace)
    if not yes and not confirm(f"Delete {chosen.text} from {location.folder}?"):
        raise typer.Exit(1)
    clear(location, chosen)


def _export(
    key: KeyText,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    folder: CacheDir = None,
    config: ConfigFile = None,
    key_file: KeyFile = None,
) -> None:
    """Write a prefix, from its first token to this block, to one file.

    It holds the prompt in readable form: treat it like the prompt itself.
    """
    from firn.cli.cache.work import export

    export(_location(folder, config, key_file), key, file)


def _import(
    file: Annotated[Path, typer.Argument(help="A file that export wrote.")],
    folder: CacheDir = None,
    config: ConfigFile = None,
    key_file: KeyFile = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Store it for this namespace (otherwise for the one it came from)."),
    ] = None,
) -> None:
    """Add an exported prefix to the folder, verified, within the folder's limit.

    A model answers from what it is given here: import files from people you trust.
    """
    from firn.cli.cache.work import import_

    import_(_location(folder, config, key_file), file, namespace=namespace)


def _advise(
    trace: TraceArgument,
    model: Annotated[
        str | None, typer.Option(help="Only this model's requests, if the trace has several.")
    ] = None,
    token_bytes: Annotated[
        int,
        typer.Option(
            help="Bytes of a token in the cache (otherwise those in the trace).",
            min=0,
            metavar="N",
        ),
    ] = 0,
    memory_gb: Annotated[
        str | None, typer.Option(help="Sizes of memory to try, in GiB.", metavar="X,Y,..")
    ] = None,
    ssd_gb: Annotated[
        str | None, typer.Option(help="Sizes of an SSD to try, in GiB.", metavar="X,Y,..")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes to use; 0 for one per core.", min=0, metavar="N")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recommend cache sizes: play a trace against a table of sizes, without a model."""
    from firn.cli.cache.advise import run

    run(
        trace,
        model=model,
        token_bytes=token_bytes,
        memory_gb=memory_gb,
        ssd_gb=ssd_gb,
        workers=workers,
        as_json=as_json,
    )
