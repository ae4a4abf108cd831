"""What is a server's own: what it refuses and evicts, how it is reached, what is said of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from kvstore import BlockRead, GetOutcome, PutOutcome, open_store
from kvstore.cli import run
from kvstore.errors import (
    InvalidOptionError,
    InvalidURLError,
    NewerFormatError,
    OlderFormatError,
    StoreAccessError,
    StoreOpenError,
    TierUnavailable,
)
from kvstore.testing.patience import patiently, within
from kvstore.testing.servers import free_port, valkey
from kvstore.testing.supply import SPACE, get, key, write
from kvstore.types import ResealOutcome
from kvstore.values import name_of
from kvstore_redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from kvstore.testing.servers import RedisServer

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
STORED, FULL, FAILED = PutOutcome.STORED, PutOutcome.FULL, PutOutcome.FAILED
REFUSED = PutOutcome.REFUSED
GOLDEN = Path(__file__).parents[1] / "golden" / "v1" / "values.json"


@pytest.fixture
def url(place: str) -> str:
    return place


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, password=server.password) as behind:
        yield behind


def name(url: str, number: int) -> str:
    return url.partition("prefix=")[2] + name_of(SPACE, key(number))


def test_what_a_full_server_says_is_full_and_the_rest_of_the_batch_is_answered() -> None:
    with valkey("maxmemory 4mb", "maxmemory-policy noeviction") as small, open_store(small.url()) as store:
        outcomes = [store.put_many(SPACE, [write(number)])[0] for number in range(200)]
        assert outcomes[0] is STORED
        assert outcomes[-1] is FULL
        assert set(store.put_many(SPACE, [write(number) for number in (0, 500, 501)])[1:]) == {FULL}
        assert get(store, [0]) == [HIT]


def test_what_the_server_evicts_is_a_miss_and_is_stored_again() -> None:
    with valkey("maxmemory 4mb", "maxmemory-policy allkeys-lru") as small, open_store(small.url()) as store:
        for number in range(200):
            assert store.put_many(SPACE, [write(number)]) == [STORED]
        found = get(store, range(200))
        assert set(found) == {HIT, MISS}
        assert store.put_many(SPACE, [write(found.index(MISS))]) == [STORED]
        assert [space.fingerprint for space in store.namespaces()] == [SPACE.fingerprint]


def test_with_a_ttl_the_server_removes_blocks_by_itself_and_their_manifest_stays(url: str, client: redis.Redis) -> None:
    with open_store(url, ttl="300ms") as store:
        store.put_many(SPACE, [write(1)])
        assert 0 < client.pttl(name(url, 1)) <= 300
        time.sleep(0.5)
        assert client.get(name(url, 1)) is None
        assert len(store.namespaces()) == 1
    with open_store(url) as store:
        store.put_many(SPACE, [write(2)])
        assert client.pttl(name(url, 2)) == -1


def test_a_value_that_is_no_string_is_damage_and_is_replaced(url: str, client: redis.Redis) -> None:
    with open_store(url) as store:
        store.put_many(SPACE, [write(number) for number in range(3)])
        client.delete(name(url, 1))
        client.rpush(name(url, 1), b"a list")
        assert get(store, [0, 1, 2]) == [HIT, CORRUPT, HIT]
        assert store.put_many(SPACE, [write(1)]) == [STORED]


def test_a_value_that_is_too_long_is_damage_and_the_next_reply_is_read_from_its_start(
    url: str, client: redis.Redis
) -> None:
    with open_store(url) as store:
        store.put_many(SPACE, [write(number) for number in range(3)])
        client.append(name(url, 1), bytes(300_000))
        assert get(store, [0, 1, 2]) == [HIT, CORRUPT, HIT]
        assert get(store, [0, 1, 2]) == [HIT, MISS, HIT]


def test_two_prefixes_are_two_tiers_and_strangers_stay_as_they_are(
    server: RedisServer, url: str, client: redis.Redis
) -> None:
    client.set("of somebody else", b"1")
    with open_store(url) as one, open_store(f"{server.url()}?prefix=other:") as other:
        one.put_many(SPACE, [write(1)])
        assert get(other, [1]) == [MISS]
        assert other.namespaces() == []
        assert one.drop_namespace(SPACE) == 1
    assert client.get("of somebody else") == b"1"


def test_many_threads_of_one_store_get_their_own_bytes(url: str) -> None:
    wrong: list[Any] = []
    with open_store(url) as store:

        def work(worker: int) -> None:
            numbers = [worker * 10 + number for number in range(10)]
            for _ in range(5):
                store.put_many(SPACE, [write(number) for number in numbers])
                wrong.extend(outcome for outcome in get(store, numbers) if outcome is not HIT)
                store.delete_many(SPACE, [key(number) for number in numbers])

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


class TestOpening:
    """The reasons that a server cannot be used are told apart."""

    def test_nobody_listens(self) -> None:
        with pytest.raises(StoreOpenError, match="the server cannot be asked"):
            open_store(f"redis://127.0.0.1:{free_port()}/0")

    @pytest.mark.parametrize("user", [":wrong@", "nobody:wrong@", ""])
    def test_credentials_that_are_wrong_or_missing_and_never_shown(self, server: RedisServer, user: str) -> None:
        with pytest.raises(StoreAccessError, match="does not let this user in") as caught:
            open_store(f"redis://{user}127.0.0.1:{server.port}/0")
        assert "wrong" not in str(caught.value).partition("user in")[0]

    def test_a_password_with_letters_that_a_url_has_to_encode(self) -> None:
        with valkey("user ada on >p@ss:w/rd ~* &* +@all") as server:
            open_store(f"redis://ada:p%40ss%3Aw%2Frd@127.0.0.1:{server.port}/0").close()

    @pytest.mark.parametrize("place", ["", ":6379", "host:port/0", "host:6379/zero", "host/1/2"])
    def test_a_place_that_makes_no_sense(self, place: str) -> None:
        with pytest.raises(InvalidURLError, match=r"redis://host:6379/0|not a port|no location|which host"):
            open_store(f"redis://{place}")

    def test_a_database_that_the_server_does_not_have(self, server: RedisServer) -> None:
        with pytest.raises(StoreOpenError, match="out of range"):
            open_store(server.url(99))

    @pytest.mark.parametrize("prefix", ["a b", "a*", "[a]"])
    def test_a_prefix_that_would_match_more_than_itself(self, server: RedisServer, prefix: str) -> None:
        with pytest.raises(InvalidOptionError, match="prefix"):
            open_store(server.url(), prefix=prefix)

    def test_read_only_where_the_server_evicted_everything_but_blocks(self, url: str, client: redis.Redis) -> None:
        with open_store(url) as store:
            store.put_many(SPACE, [write(1)])
        client.delete(url.partition("prefix=")[2] + "format")
        with open_store(url, readonly=True) as store:
            assert get(store, [1]) == [HIT]


class TestOutage:
    """A server that is gone, or says nothing, costs no more than the time-out; it is used again when it is back."""

    TIMEOUT = 0.3

    @contextmanager
    def hurried(self, server: RedisServer) -> Generator[Any]:
        """A store with block 1 in it, which is to meet an outage."""
        with patiently(lambda: open_store(server.url(), timeout=self.TIMEOUT), self.TIMEOUT) as store:
            patiently(lambda: store.put_many(SPACE, [write(1)]), self.TIMEOUT)
            yield store

    def test_a_server_that_is_stopped_and_goes_on(self) -> None:
        with valkey() as server, self.hurried(server) as store:
            os.kill(server.process, signal.SIGSTOP)
            try:
                for call in (
                    lambda: get(store, [1]),
                    lambda: store.put_many(SPACE, [write(2)]),
                    lambda: store.contains_many(SPACE, [key(1)]),
                    store.namespaces,
                ):
                    with within(self.TIMEOUT), pytest.raises(TierUnavailable):
                        call()
            finally:
                os.kill(server.process, signal.SIGCONT)
            assert patiently(lambda: get(store, [1]), self.TIMEOUT) == [HIT]

    def test_a_server_that_ends(self) -> None:
        with valkey() as server, self.hurried(server) as store:
            os.kill(server.process, signal.SIGKILL)
            time.sleep(0.2)
            with pytest.raises(TierUnavailable):
                get(store, [1])
            store.close()


def test_the_doctor_says_what_bounds_the_server(server: RedisServer) -> None:
    from kvstore.doctor import Grade, examine

    found = {finding.check: finding for finding in examine(server.url())}
    assert found["memory"].grade is Grade.WARNING
    assert "grows until" in found["memory"].found
    assert found["network"].found == "this machine"
    with valkey("maxmemory 64mb", "maxmemory-policy allkeys-lru", "appendonly yes") as bounded:
        found = {finding.check: finding for finding in examine(bounded.url())}
        assert found["memory"].grade is Grade.OK
        assert "append-only file" in found["persistence"].found


class TestFormat:
    def test_the_golden_values_of_version_1_are_read_from_a_server(self, url: str, client: redis.Redis) -> None:
        prefix = url.partition("prefix=")[2]
        values = json.loads(GOLDEN.read_text())
        client.mset({prefix + one: bytes.fromhex(text) for one, text in values.items()})
        blocks = sum(one.count("-") == 2 and not one.startswith("purged") for one in values)
        with open_store(url, readonly=True) as store:
            found = [(space, info.key) for space in store.namespaces() for info in store.scan(space)]
            assert len(found) == blocks > 10
            for space, key_ in found:
                into = bytearray(space.block_bytes(key_.group))
                assert store.get_many_into(space, [BlockRead(key_, into)]) == [HIT]

    @pytest.mark.parametrize(("version", "error"), [(b"0", OlderFormatError), (b"2", NewerFormatError)])
    def test_a_tier_of_another_version_is_refused(
        self, version: bytes, error: type[Exception], url: str, client: redis.Redis
    ) -> None:
        client.set(url.partition("prefix=")[2] + "format", version)
        for readonly in (True, False):
            with pytest.raises(error, match=f"format {version.decode()}"):
                open_store(url, readonly=readonly)

    def test_with_a_ttl_what_is_said_of_all_blocks_outlives_them(
        self, url: str, client: redis.Redis, tmp_path: Path
    ) -> None:
        (tmp_path / "key").write_text(secrets.token_hex(32))
        sealed = {"encryption": f"file:{tmp_path}/key", "keyring": f"{tmp_path}/ring.json"}
        with open_store(url, ttl="1h", **sealed) as store:
            store.put_many(SPACE, [write(1)])
        prefix = url.partition("prefix=")[2]
        assert client.ttl(name(url, 1)) > 0
        for one in ("format", "sealed", f"manifest-{SPACE.name}"):
            assert client.ttl(prefix + one) == -1, one


def test_a_new_data_key_takes_the_place_of_the_old_one_and_the_time_to_live_goes_on(
    url: str, client: redis.Redis, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(secrets.token_hex(32))
    sealed = {"encryption": f"file:{tmp_path}/key", "keyring": f"{tmp_path}/ring.json"}
    with open_store(url, ttl="1h", **sealed) as store:
        store.put_many(SPACE, [write(1), write(2)])
        client.expire(name(url, 1), 100)
        store.delete_many(SPACE, [key(2)])
        before = client.get(name(url, 1))
        assert store.reseal_many(SPACE, [write(1), write(2)]) == [ResealOutcome.RESEALED, ResealOutcome.GONE]
        assert client.get(name(url, 1)) != before
        assert 0 < client.ttl(name(url, 1)) <= 100
        assert get(store, [1, 2]) == [HIT, MISS]
        assert isinstance(store, RedisStore)
        assert not store.replace("what was purged meanwhile", [memoryview(b"0")])
        assert not store.exists("what was purged meanwhile")


def fill(server: RedisServer, step: int) -> None:
    """To the last bytes, with what is not kvstore's."""
    with redis.Redis(port=server.port, password=server.password) as behind, contextlib.suppress(redis.OutOfMemoryError):
        for number in range(1 << 20):
            behind.set(f"filler-{number}", b"x" * step)


def test_a_full_server_can_be_looked_at_collected_verified_and_purged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with valkey("maxmemory 4mb", "maxmemory-policy noeviction") as small:
        url = small.url()
        with open_store(url) as store:
            stored = [n for n in range(200) if store.put_many(SPACE, [write(n)]) == [STORED]]
        with redis.Redis(port=small.port, password=small.password) as behind:
            used: Any = behind.info("memory")
            behind.config_set("maxmemory", used["used_memory"] - (512 << 10))
        for command in (
            ["stat", url],
            ["verify", url],
            ["gc", url, "--yes"],
            ["ls", url],
            ["cp", url, f"file://{tmp_path}/kv"],
        ):
            assert run(command) == 0, (command, capsys.readouterr())
        with open_store(url) as store:
            assert get(store, stored[:1]) == [HIT]
            assert store.put_many(SPACE, [write(900)]) == [FULL]
        capsys.readouterr()
        assert run(["purge", url, "--all", "--yes", "--json"]) == 0
        (tier,) = json.loads(capsys.readouterr().out)["tiers"]
        assert (tier["blocks"], tier["left"]) == (len(stored), 0)
        with open_store(url) as store:
            assert store.put_many(SPACE, [write(number) for number in (*stored[:2], 901)]) == [REFUSED, REFUSED, STORED]
        with redis.Redis(port=small.port, password=small.password) as behind:
            # Redis, when it is full, refuses whatever stands in a transaction; Valkey 9 does not.
            assert "cmdstat_multi" not in behind.info("commandstats")


def test_a_new_tier_opens_on_a_full_server_and_stores_when_there_is_room() -> None:
    with (
        valkey("maxmemory 12mb", "maxmemory-policy noeviction") as small,
        redis.Redis(port=small.port, password=small.password) as behind,
    ):
        fill(small, 1000)
        with open_store(small.url()) as store:
            assert store.put_many(SPACE, [write(1)]) == [FULL]
            assert get(store, [1]) == [GetOutcome.MISS]
            behind.flushall()
            for _ in range(100):
                if store.put_many(SPACE, [write(1)]) == [STORED]:
                    break
                time.sleep(0.05)
            assert get(store, [1]) == [HIT]
