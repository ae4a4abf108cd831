"""Replies that are late, cut short or refusals, and TLS: no reply is taken for another, and no server for another."""

from __future__ import annotations

import datetime
import ssl
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from redis_between import between

from kvstore import BlockLayout, BlockRead, BlockWrite, GetOutcome, Namespace, PutOutcome, TierURL, open_store
from kvstore.errors import StoreOpenError, TierUnavailable
from kvstore.testing.patience import patiently
from kvstore.testing.supply import SPACE, get, key, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from redis_between import Between

    from kvstore.testing.servers import RedisServer

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS
TIMEOUT = 1.5
LARGE = Namespace("model", "revision", (BlockLayout.opaque(8 << 20),), block_tokens=16)


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Between]:
    with between(server.port) as here:
        yield here


@pytest.fixture
def behind(server: RedisServer, place: str, proxy: Between) -> str:
    """The tier at `place` with three blocks in it, behind the proxy."""
    with open_store(place) as store:
        store.put_many(SPACE, [write(number) for number in range(3)])
    return place.replace(f":{server.port}/", f":{proxy.port}/")


@pytest.fixture
def store(behind: str) -> Iterator[Any]:
    with open_store(behind) as opened:
        get(opened, [0])
        yield opened


@pytest.fixture
def hasty(behind: str) -> Iterator[Any]:
    """A store that does not wait long for a reply that does not come."""
    with patiently(lambda: open_store(behind, timeout=TIMEOUT), TIMEOUT) as opened:
        patiently(lambda: get(opened, [0]), TIMEOUT)
        yield opened


@pytest.mark.parametrize("ends", [True, False])
def test_a_reply_that_ends_half_way_is_no_block_and_its_rest_is_not_taken_for_another(
    hasty: Any, proxy: Between, ends: bool
) -> None:
    store = hasty
    proxy.most, proxy.ends = 1000, ends
    with pytest.raises(TierUnavailable):
        get(store, [0])
    assert proxy.most is None
    assert patiently(lambda: get(store, [1, 2]), TIMEOUT) == [HIT] * 2
    assert patiently(lambda: get(store, [0]), TIMEOUT) == [HIT]


def test_whoever_stops_taking_answers_leaves_none_for_the_next(store: Any, proxy: Between) -> None:
    def some() -> Iterator[Any]:
        yield "one", [memoryview(b"x")]
        while proxy.most is not None:  # until the server has answered
            time.sleep(0.01)
        raise KeyboardInterrupt

    proxy.most = 0
    with pytest.raises(KeyboardInterrupt):
        store.write_many(some())
    assert store.read_many_into([("nothing", [memoryview(bytearray(1 << 20))])]) == [None]


@pytest.mark.parametrize(
    "refusal",
    [
        "CLUSTERDOWN The cluster is down",
        "MASTERDOWN Link with MASTER is down",
        "MOVED 3999 127.0.0.1:6381",
        "ASK 3999 127.0.0.1:6381",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        "BUSY A script is running",
        "LOADING The dataset is being loaded",
        "NOAUTH Authentication required.",
    ],
)
def test_what_holds_for_the_whole_server_is_an_outage_and_not_a_refused_block(
    store: Any, proxy: Between, refusal: str
) -> None:
    proxy.instead_of_ok = b"-%s\r\n" % refusal.encode()
    with pytest.raises(TierUnavailable):
        store.put_many(SPACE, [write(5)])
    assert proxy.instead_of_ok == b""
    assert store.put_many(SPACE, [write(6)]) == [PutOutcome.STORED]


def test_one_that_holds_for_the_block_is_its_outcome(store: Any, proxy: Between) -> None:
    proxy.instead_of_ok = b"-NOPERM No permissions to access a key\r\n"
    assert store.put_many(SPACE, [write(5)]) == [PutOutcome.FAILED]


def test_bytes_go_from_the_callers_memory_and_into_it(place: str) -> None:
    kept = np.random.default_rng(1).integers(0, 256, LARGE.block_bytes(), np.uint8)
    into = np.zeros_like(kept)
    with open_store(place) as store:
        store.put_many(LARGE, [BlockWrite(key(1), kept)])  # what is made once
        tracemalloc.start()
        try:
            assert store.put_many(LARGE, [BlockWrite(key(2), kept)]) == [PutOutcome.STORED]
            assert store.get_many_into(LARGE, [BlockRead(key(2), into)]) == [HIT]
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert np.array_equal(into, kept)
    assert most < kept.nbytes // 4


@pytest.mark.parametrize("place", ["[::1]/0", "[::1]:6379/0", "localhost", "127.0.0.1:1/0"])
def test_the_doctor_knows_this_machine_by_every_name(server: RedisServer, place: str) -> None:
    import redis

    from kvstore_redis import _place
    from kvstore_redis.diagnosis import diagnose

    url = TierURL.parse(f"redis://{place}")
    client = redis.Redis(port=server.port, password=server.password)
    found = {finding.check: finding.found for finding in diagnose(url, _place(url)[0], client, None)}
    assert found["network"] == "this machine"


class TestTLS:
    """`rediss://`: whose certificate it is decides, and for which host."""

    @pytest.fixture
    def certificate(self, tmp_path: Path) -> Path:
        pytest.importorskip("cryptography", reason='pip install "kvstore-tiers[encryption]"')
        return _certificate_for("localhost", tmp_path / "certificate.pem")

    @pytest.fixture
    def encrypted(self, server: RedisServer, certificate: Path) -> Iterator[Between]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        with between(server.port, context) as here:
            yield here

    def test_blocks_come_and_go(self, server: RedisServer, encrypted: Between, certificate: Path) -> None:
        url = f"rediss://:{server.password}@localhost:{encrypted.port}/0"
        with open_store(url, prefix="tls:", ca_certs=str(certificate)) as store:
            store.put_many(SPACE, [write(1)])
            assert get(store, [1, 2]) == [HIT, MISS]

    def test_a_certificate_for_another_host(self, server: RedisServer, encrypted: Between, certificate: Path) -> None:
        with pytest.raises(StoreOpenError, match=r"not valid for '127\.0\.0\.1'"):
            open_store(f"rediss://:{server.password}@127.0.0.1:{encrypted.port}/0", ca_certs=str(certificate))

    def test_a_certificate_of_nobody_that_is_trusted(self, server: RedisServer, encrypted: Between) -> None:
        with pytest.raises(StoreOpenError, match="self-signed certificate"):
            open_store(f"rediss://:{server.password}@localhost:{encrypted.port}/0")


def _certificate_for(host: str, file: Path) -> Path:
    """Its own authority, with the key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    file.write_bytes(
        signed.public_bytes(serialization.Encoding.PEM)
        + secret.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return file
