from __future__ import annotations

import pytest

from firn.api.http.auth import ANYONE, SHARED, Caller, Keys, namespace_of
from firn.core.errors import Unauthorized


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def test_without_keys_all_callers_share_a_namespace() -> None:
    assert not Keys().required
    assert Keys().admit([]) == ANYONE
    assert Keys().admit(bearer("whatever")) == ANYONE


def test_each_key_has_a_namespace_of_its_own() -> None:
    keys = Keys(["alice", "bob"])
    alice, bob = keys.admit(bearer("alice")), keys.admit(bearer("bob"))
    assert alice == Caller(namespace_of("alice"), namespace_of("alice"))
    assert len({alice, bob, ANYONE}) == 3
    assert "alice" not in alice.key_id


def test_share_puts_all_keys_into_one_namespace() -> None:
    keys = Keys(["alice", "bob"], share=True)
    alice, bob = keys.admit(bearer("alice")), keys.admit(bearer("bob"))
    assert alice.namespace == bob.namespace == SHARED
    assert keys.namespaces == (SHARED,)
    assert len({alice.key_id, bob.key_id, SHARED}) == 3, "responses and quotas are not shared"


def test_the_namespace_of_a_key_never_changes() -> None:
    # It is the root of every key of the cache on disk: another value would lose the whole cache.
    assert namespace_of("alice") == "c1685a70a8233ebd522b2927ea6ad735"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"bearer alice")],
        [(b"authorization", b"Bearer   alice ")],
        [(b"x-api-key", b"alice")],
        [(b"x-api-key", b"wrong"), (b"authorization", b"Bearer alice")],
        [(b"authorization", b"Bearer wrong"), (b"x-api-key", b"alice")],
    ],
)
def test_ways_to_present_a_key(headers: list[tuple[bytes, bytes]]) -> None:
    assert Keys(["bob", "alice"]).admit(headers).key_id == namespace_of("alice")


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic alice")],
        [(b"authorization", b"alice")],
        [(b"authorization", b"Bearer alic")],
        [(b"authorization", b"Bearer alicee")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"x-api-key", b"")],
        [(b"cookie", b"alice")],
    ],
)
def test_missing_and_wrong_keys_are_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(Unauthorized):
        Keys(["alice"]).admit(headers)
