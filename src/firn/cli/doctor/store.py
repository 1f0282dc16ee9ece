"""`firn doctor` for shared stores (`--tier`): writes one small record to each and reads it back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from firn.cache.storage.faults import PermanentFault, TierError, TierFull
from firn.cache.storage.store_address import StoreAddress, parse_address
from firn.cache.storage.store_probe import PROBE_NBYTES, StoreReport, probe
from firn.cache.tiers import Store, discover
from firn.cli.doctor.findings import Finding
from firn.core.errors import SetupError
from firn.core.units import MIB

SLOW_ANSWER_S = 0.1
"""A lookup takes up to three round trips: a slower store is seldom worth one."""
STEPS = {"ask": "be queried", "write": "be written to", "read": "be read", "delete": "delete"}


def store_findings(addresses: Sequence[str]) -> Iterator[Finding]:
    # Failures become findings: without a handler, Python would print the log's warnings as well.
    logging.getLogger("firn.cache").addHandler(logging.NullHandler())
    for text in addresses:
        try:
            address = parse_address(text)
            store = discover()[address.kind](address.options)
        except SetupError as error:
            yield Finding("store", error.message, "problem")
            continue
        assert isinstance(store, Store)
        yield from describe_store(address, probe(store))


def describe_store(address: StoreAddress, report: StoreReport) -> Iterator[Finding]:
    if report.error is not None:
        yield Finding("store", f"{address.shown} {_failure(report, report.error)}", "problem")
        return
    mib = PROBE_NBYTES / MIB
    text = (
        f"{address.shown} answers in {report.answer_s * 1e3:.1f} ms, writes "
        f"{mib / report.write_s:.0f} MiB/s and reads {mib / report.read_s:.0f} MiB/s (one record "
        f"of {mib:.0f} MiB, one thread)"
    )
    yield Finding("store", text)
    if not report.same_bytes:
        yield Finding("", "It does not return the bytes that were written to it.", "problem")
    if not report.writes_once:
        text = (
            "It ignores conditional writes: two servers may write the same record twice, which costs "
            "traffic and nothing else."
        )
        yield Finding("", text, "note")
    if report.answer_s > SLOW_ANSWER_S:
        yield Finding("", "It is slow to answer: only long prompts will wait for it.", "note")


def _failure(report: StoreReport, error: TierError) -> str:
    cannot = f"cannot {STEPS[report.failed]}: {error.message}"
    match error:
        case PermanentFault() if report.failed == "ask":
            return (
                f"{cannot}. Are the credentials right? S3 also needs the right to list the bucket."
            )
        case PermanentFault():
            return f"{cannot}. Records need the rights to get, put and delete."
        case TierFull():
            return f"{cannot}. Nothing more will be stored until space is freed."
        case _:
            return cannot
