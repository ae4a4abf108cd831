"""What leads to a bucket, and what is said when it does not. Field report 21: path-style, endpoint, prefix, one PUT."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import open_store
from kvstore.errors import (
    InvalidOptionError,
    InvalidURLError,
    StoreNotFoundError,
    StoreOpenError,
    UnknownOptionError,
)
from kvstore.layout import BlockLayout
from kvstore.testing.proxy import ANY, FaultProxy, answering
from kvstore.testing.servers import free_port
from kvstore.testing.supply import MIB, SPACE, get, held, keys, write, writes
from kvstore.types import GetOutcome, PutOutcome

if TYPE_CHECKING:
    from kvstore.testing.servers import S3Server

HIT, STORED = GetOutcome.HIT, PutOutcome.STORED
SECRET = "hunter2hunter2"


def refusal(url: str, **options: Any) -> str:
    """The whole message with which opening is refused."""
    with pytest.raises(StoreOpenError) as caught:
        open_store(url, **options).close()
    return f"{type(caught.value).__name__} {caught.value}"


# Four things that can be wrong, and what is said of each


def test_a_bucket_that_is_missing_is_named(server: S3Server, credentials: None, client: str) -> None:
    del credentials
    said = refusal("s3://no-such-bucket/prefix", client=client)
    assert "StoreNotFoundError" in said
    assert "no bucket 'no-such-bucket'" in said
    assert server.endpoint in said or "the endpoint in use" in said


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_credentials_that_are_wrong_are_not_shown(server: S3Server, place: str, client: str, wrong: str) -> None:
    given = {"key": server.access_key, "secret": server.secret_key, wrong: SECRET}
    said = refusal(place, client=client, storage_options=given)
    assert "StoreAccessError" in said
    assert "credentials" in said
    assert "AWS_ACCESS_KEY_ID" in said
    assert SECRET not in said
    assert server.secret_key not in said


def test_a_bucket_in_another_region_says_to_name_it(server: S3Server, place: str, client: str) -> None:
    with FaultProxy(server.port) as proxy:
        proxy.plan[ANY] = answering(400, "AuthorizationHeaderMalformed")  # as AWS does; no server here minds the region
        said = refusal(place, client=client, endpoint=proxy.endpoint, region="eu-central-9")
    assert "StoreAccessError" in said
    assert "region=" in said


def test_an_endpoint_where_nobody_listens_is_said_within_the_time(place: str, client: str) -> None:
    said = refusal(place, client=client, endpoint=f"http://127.0.0.1:{free_port()}")
    assert "cannot be reached" in said
    assert "endpoint" in said


def test_no_message_of_the_four_is_another(server: S3Server, place: str) -> None:
    refused = [
        refusal("s3://no-such-bucket/prefix"),
        refusal(place, storage_options={"key": server.access_key, "secret": "wrong"}),
        refusal(place, endpoint=f"http://127.0.0.1:{free_port()}"),
    ]
    assert len({said.partition("tier")[2] or said for said in refused}) == 3


# What can be said, and where


def test_everything_can_be_said_in_the_url_and_beside_it(
    server: S3Server, place: str, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in server.environment:
        monkeypatch.delenv(name)
    where = f"{place}?endpoint={server.endpoint}&region={server.region}&addressing=path&client={client}"
    who = {"key": server.access_key, "secret": server.secret_key}
    with open_store(where, storage_options=who) as store:
        assert store.put_many(SPACE, [write(1)]) == [STORED]
    configured = json.loads(json.dumps({"url": where, "storage_options": who}))
    with open_store(configured) as store:
        assert get(store, [1]) == [HIT]
        assert server.secret_key not in repr(store)


def test_a_profile_leads_to_its_endpoint_with_its_credentials(
    overwriting_server: S3Server, second_profile: str, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = overwriting_server.url(f"profile-{client}")
    with open_store(url, profile=second_profile, client=client) as store:
        assert store.put_many(SPACE, [write(1)]) == [STORED]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", second_profile)
    with open_store(url, client=client) as store:
        assert get(store, [1]) == [HIT]


def test_a_profile_that_is_not_there_is_refused_with_those_that_are(second_profile: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"no profile 'third'.*{second_profile}"):
        open_store("s3://bucket", profile="third")


@pytest.mark.parametrize(("addressing", "target"), [("path", "s3.example/bucket"), ("virtual", "bucket.s3.example")])
def test_the_buckets_name_stands_in_the_path_or_in_the_host(
    credentials: None, server: S3Server, monkeypatch: pytest.MonkeyPatch, client: str, addressing: str, target: str
) -> None:
    del credentials
    with FaultProxy(server.port) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.endpoint)  # so that a name nobody has leads somewhere
        monkeypatch.setenv("http_proxy", proxy.endpoint)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        proxy.plan[ANY] = answering(404, "NoSuchBucket")
        with pytest.raises(StoreNotFoundError):
            open_store("s3://bucket/p", endpoint="http://s3.example", addressing=addressing, client=client)
        assert {request.target.partition("?")[0].rstrip("/") for request in proxy.requests} == {f"http://{target}"}


@pytest.mark.parametrize("anonymous", [False, True])
def test_an_anonymous_request_is_not_signed(server: S3Server, place: str, client: str, anonymous: bool) -> None:
    if not anonymous:
        with open_store(place, client=client) as store:
            assert store.namespaces() == []
        return
    assert "StoreAccessError" in refusal(place, client=client, anonymous=True, endpoint=server.endpoint)


@pytest.mark.parametrize("prefix", ["", "/", "/a/b//c/", "/with space/and ü", "/a%2520b", "/dots.and-dashes_"])
def test_any_prefix_is_one_place_for_both_clients(
    server: S3Server, credentials: None, prefix: str, serial: int
) -> None:
    del credentials
    url = f"s3://{server.bucket}{prefix}" if not prefix.strip("/") else f"s3://{server.bucket}/{serial}{prefix}"
    with open_store(url, client="obstore") as one, open_store(url, client="fsspec") as two:
        one.put_many(SPACE, [write(1)])
        two.put_many(SPACE, [write(2)])
        assert get(one, [1, 2]) == get(two, [1, 2]) == [HIT, HIT]
        assert held(one) == held(two) == set(keys([1, 2]))
        one.delete_many(SPACE, keys([1, 2]))


@pytest.mark.parametrize("nbytes", [64 << 10, 20 * MIB])
def test_a_put_is_one_request_and_a_get_is_one(server: S3Server, place: str, client: str, nbytes: int) -> None:
    space = replace(SPACE, layouts=(BlockLayout.opaque(nbytes),))
    with (
        FaultProxy(server.port) as proxy,
        open_store(place, client=client, endpoint=proxy.endpoint) as store,
    ):
        store.put_many(space, [write(1, space)])  # and the documents around it
        store.put_many(space, [write(1, space)])
        before = proxy.counts
        other = next(name for name in range(2, 5000) if keys([name])[0].digest[0] == keys([1])[0].digest[0])
        assert store.put_many(space, [write(other, space)]) == [STORED]
        assert proxy.counts - before == {"PUT": 1}
        before = proxy.counts
        assert get(store, [other], space) == [HIT]
        assert proxy.counts - before == {"GET": 1}


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", {"endpoint": "localhost:9000"}),
        ("s3://bucket", {"endpoint": f"http://user:{SECRET}@host"}),
        ("s3://bucket", {"addressing": "somehow"}),
        ("s3://bucket", {"client": "boto3"}),
        ("s3://bucket", {"timeout": "soon"}),
        ("s3://bucket", {"timeout": 0}),
        ("s3://bucket", {"storage_options": SECRET}),
        ("s3://bucket", {"client": "obstore", "storage_options": {"of_s3fs_alone": 1}}),
        ("zarr+memory://here", {"endpoint": "http://127.0.0.1:1"}),
        ("zarr+memory://here", {"client": "obstore"}),
        ("http://127.0.0.1:1/tier", {"readonly": False}),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        open_store(url, **options)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///prefix", "s3://a/../b", "s3://bucket/a%0Ab", f"s3://key:{SECRET}@bucket/prefix"]
)
def test_a_url_that_names_no_bucket_or_has_a_password_is_refused(url: str) -> None:
    with pytest.raises(InvalidURLError) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


def test_an_unknown_option_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'endpoint'"):
        open_store("s3://bucket", endpont="http://127.0.0.1")


def test_a_store_that_may_not_be_written_says_so_once_and_serves(
    server: S3Server, place: str, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store(place, client=client) as store:
        store.put_many(SPACE, [write(1)])
    with FaultProxy(server.port) as proxy, open_store(place, client=client, endpoint=proxy.endpoint) as store:
        proxy.plan["PUT"] = answering(403, "AccessDenied")
        with caplog.at_level(logging.WARNING, "kvstore.objects"):
            assert store.put_many(SPACE, writes([2])) == store.put_many(SPACE, writes([3])) == [PutOutcome.FAILED]
        assert len(caplog.records) == 1
        assert get(store, [1]) == [HIT]
        proxy.plan["PUT"] = answering(507, "InsufficientStorage")
        assert store.put_many(SPACE, writes([2])) == [PutOutcome.FULL]


def test_nothing_is_created_by_opening(server: S3Server, place: str, client: str) -> None:
    open_store(place, client=client).close()
    prefix = place.removeprefix(f"s3://{server.bucket}/")
    assert [page for page in server.objects.list(prefix) if page] == []
    with pytest.raises(StoreNotFoundError):
        open_store(place, client=client, readonly=True)


def test_a_namespace_of_a_later_format_is_left_alone(server: S3Server, place: str, client: str) -> None:
    with open_store(place, client=client) as store:
        store.put_many(SPACE, [write(1)])
    path = f"{place.removeprefix(f's3://{server.bucket}/')}/{SPACE.name}/zarr.json"
    document = json.loads(bytes(server.objects.get(path).bytes()))
    document["attributes"]["kvstore"]["format"] = 99
    document["attributes"]["kvstore"]["namespace"]["model"] = "what version 1 does not name so"
    server.objects.put(path, json.dumps(document).encode())
    assert "format 99" in refusal(place, client=client)
