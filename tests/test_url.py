"""Tier URLs: whatever is wrong is an error that names what is known, and a secret is in no message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore import TierURL, open_store
from kvstore.errors import (
    ConfigurationError,
    InvalidOptionError,
    InvalidURLError,
    StoreOpenError,
    UnknownOptionError,
)
from kvstore.url import (
    CAPACITY,
    DURABILITY,
    IO,
    MODE,
    READONLY,
    Capacity,
    Option,
    format_size,
    local_path,
    parse_duration,
    parse_size,
)

SHARED = (CAPACITY, DURABILITY, IO, READONLY, MODE)
SECRET = "hunter2"


def value_of(option: Option[Any], given: Any) -> Any:
    return TierURL.parse("file:///kv", **{option.name: given}).validated(SHARED).option(option)


# What a URL says


def test_a_url_is_taken_apart_once() -> None:
    url = TierURL.parse("zarr+file:///mnt/my%20disk/kv%3F?capacity=80%&durability=fsync")
    assert (url.format, url.scheme, url.location) == ("zarr", "file", "/mnt/my disk/kv?")
    assert url.raw_options == {"capacity": "80%", "durability": "fsync"}


def test_the_three_ways_to_give_options_mean_the_same() -> None:
    in_url = TierURL.parse("file:///kv?durability=fsync")
    assert in_url == TierURL.parse("file:///kv", durability="fsync")
    assert in_url == TierURL.parse({"url": "file:///kv", "durability": "fsync"})
    assert in_url == TierURL.parse(TierURL.parse("file:///kv"), durability="fsync")


def test_an_option_that_was_not_given_has_its_default() -> None:
    url = TierURL.parse("file:///kv").validated(SHARED)
    assert [url.option(option) for option in SHARED] == [None, "none", "auto", False, 0o600]


def test_a_chained_scheme_and_a_port_are_part_of_the_url() -> None:
    assert TierURL.parse("simplecache::s3://bucket/prefix").scheme == "simplecache::s3"
    assert TierURL.parse("redis://host:6379/0").location == "host:6379/0"
    assert TierURL.parse("redis://[::1]:6379/0").location == "[::1]:6379/0"


# What is no URL


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a tier URL"),
        ("kv", "file:///"),
        ("/mnt/nvme/kv", "file:///mnt/nvme/kv"),
        ("file:/mnt/kv", 'write "file:///mnt/kv" with three slashes'),
        ("lmdb:/mnt/my kv", 'write "lmdb:///mnt/my%20kv" with three slashes'),
        ("FILE:///kv", 'write "file://" instead of "FILE://"'),
        ("~/kv", f'write "file://{Path.home()}/kv"'),
        ("file:///per%cent", "% that means itself is %25"),
        ("file:///what?/kv", r"a \? that is part of the location is %3F"),
        ("file:///\udcff", "not UTF-8"),
        ("file+://kv", "not a tier URL"),
        ("://kv", "not a tier URL"),
        ("file:///kv?capacity", "name=value"),
        ("file:///kv?&&", "name=value"),
        ("file:///kv?capacity=%ff", "UTF-8"),
        ("file:///kv%ff", "UTF-8"),
        ("file:///kv%00", "NUL"),
        ("redis://host:port/0", "not a port"),
    ],
)
def test_text_that_is_no_url_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(InvalidURLError, match=says):
        TierURL.parse(text)


@pytest.mark.parametrize("given", [None, 7, b"file:///kv", Path("/kv"), {}, {"url": 7}, {"path": "file:///kv"}])
def test_what_is_not_text_is_refused(given: Any) -> None:
    with pytest.raises(InvalidURLError):
        TierURL.parse(given)


@pytest.mark.parametrize("text", ["file://host/kv", "file://kv", "lmdb://", "file://./kv"])
def test_a_local_tier_needs_an_absolute_path_and_no_host(text: str) -> None:
    with pytest.raises(InvalidURLError, match=r"three slashes .* (file|lmdb):///"):
        local_path(TierURL.parse(text))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file://localhost/tmp/kv", "/tmp/kv"),
        ("file://~/kv", f"{Path.home()}/kv"),
        ("lmdb://mnt/my%20kv", "/mnt/my%20kv"),
    ],
)
def test_what_to_write_for_a_local_tier_is_what_was_meant(text: str, path: str) -> None:
    with pytest.raises(InvalidURLError, match=f"such as {text.partition(':')[0]}://{path}$"):
        local_path(TierURL.parse(text))


@given(st.text(max_size=40))
@example("file://[")
@example("~nobody-of-that-name")
@example("s3://b?\ud800=1")
def test_any_text_is_a_url_or_an_invalid_url_or_option(text: str) -> None:
    try:
        TierURL.parse(text)
    except (InvalidURLError, InvalidOptionError):
        return


# What is no option


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("file:///kv?capacity=1GB&capacity=2GB", {}),
        ("file:///kv?capacity=1GB", {"capacity": "1GB"}),
        ({"url": "file:///kv?capacity=1GB", "capacity": "1GB"}, {}),
        ({"url": "file:///kv", "capacity": "1GB"}, {"capacity": "1GB"}),
    ],
)
def test_an_option_given_twice_is_refused_wherever_it_stands(url: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="'capacity' was given twice"):
        TierURL.parse(url, **options)


def test_an_unknown_option_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownOptionError, match="unknown option 'capcity', did you mean 'capacity'") as refused:
        TierURL.parse("file:///kv?capcity=1GB").validated(SHARED)
    assert all(option.name in str(refused.value) and option.help in str(refused.value) for option in SHARED)


def test_names_that_python_uses_are_unknown_options_like_any_other() -> None:
    for name in ("cls", "self", "", "url "):
        with pytest.raises(UnknownOptionError, match=f"unknown option '{name}'"):
            TierURL.parse({"url": "file:///kv", name: "1"}).validated(SHARED)


def test_memory_is_opened_with_the_options_it_knows_and_no_other() -> None:
    with pytest.raises(UnknownOptionError, match="durability"):
        open_store("memory://kv", durability="fsync")


@pytest.mark.parametrize(
    ("option", "given"),
    [
        *((CAPACITY, bad) for bad in ("", "0", "0.2", "-1", "1XB", "1e9", "GB", "0%", "101%", "nan%")),
        *((CAPACITY, bad) for bad in (0, -5, True, None, 1.5)),
        *((READONLY, bad) for bad in ("", "maybe", "2", 1, None)),
        *((MODE, bad) for bad in ("", "0400", "rw", "1777", "6_00", "-600", 0o1600, -1, None, True)),
        *((IO, bad) for bad in ("", "Direct", "mmap", None)),
        *((DURABILITY, bad) for bad in ("", "always", True)),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_what_is_expected(option: Option[Any], given: Any) -> None:
    with pytest.raises(InvalidOptionError) as refused:
        value_of(option, given)
    assert option.name in str(refused.value)
    assert option.help in str(refused.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("500GB", 500 * 10**9), ("64MiB", 64 << 20), ("1.5 kb", 1500), ("2t", 2 * 10**12), (7, 7)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: Any, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "shown", "exact"),
    [
        (999, "999 B", "999 B"),
        (1_500_000, "1.5 MB", "1.5 MB (1500000 bytes)"),
        (2e18, "2000.0 PB", f"2000.0 PB ({2 * 10**18} bytes)"),
    ],
)
def test_sizes_are_shown_to_people(nbytes: float, shown: str, exact: str) -> None:
    assert (format_size(nbytes), format_size(nbytes, exact=True)) == (shown, exact)


def test_sizes_are_exact_however_large() -> None:
    assert parse_size("123456789012345678901") == 123456789012345678901
    assert parse_size("9" * 400) == int("9" * 400)


def test_a_share_of_the_disk_becomes_bytes_where_the_disk_is_known(tmp_path: Path) -> None:
    whole, half = value_of(CAPACITY, "100%").resolve(tmp_path), value_of(CAPACITY, "50%").resolve(tmp_path)
    assert whole > 0
    assert half == whole // 2
    assert value_of(CAPACITY, Capacity(bytes=5)).resolve(tmp_path) == 5


# What is never shown


def everything_said(url: Any, **options: Any) -> str:
    """Whatever a user could see of a URL: as text, as repr, in the errors of each step."""
    said: list[str] = []
    try:
        parsed = TierURL.parse(url, **options)
        said += [str(parsed), repr(parsed), f"{[parsed]}", parsed.location]
        parsed.validated([Option("access_key", _refuse, None, "a key"), Option("endpoint", _refuse, None, "a URL")])
    except ConfigurationError as error:
        said.append(str(error))
    try:
        open_store(url, **options)
    except (ConfigurationError, StoreOpenError) as error:
        said.append(str(error))
    return "\n".join(said)


def _refuse(given: Any) -> None:
    raise ValueError(f"cannot use {given!r}")


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@host:6379/0",
        f"redis://:{SECRET}@host",
        f"https://{SECRET}@127.0.0.1:1/path",
        f"redis://user:a%2F{SECRET}@host",
        f"redis://user:a@{SECRET}@host",
        f"redis://user:a/{SECRET}@host",
        f"redis://user:a?{SECRET}@host",
        f"redis://user:a?b={SECRET}@host",
        f"user:{SECRET}@host/path",
        f"user:{SECRET}/a@host",
        f"REDIS://user:{SECRET}@host?x",
        f"redis://user:{SECRET}@host?broken",
        f"redis://user:{SECRET}@host?x=1&x=2",
        f"redis://user:{SECRET}@host/%ff",
        f"s3://bucket?{SECRET}",
        f"s3://bucket?access_key={SECRET}",
        f"s3://bucket?secretAccessKey={SECRET}",
        f"s3://bucket?sas={SECRET}",
        f"s3://bucket?Authorization={SECRET}",
        f"s3://bucket?a%63cess_key={SECRET}",
        f"s3://bucket?endpoint=http://user:{SECRET}@host",
        f"s3://bucket?endpoint=http://user:/{SECRET}@host",
        f"bucket?password={SECRET}",
    ],
)
def test_a_secret_in_a_url_is_in_no_message(url: str) -> None:
    assert SECRET not in everything_said(url)


@pytest.mark.parametrize(
    "options",
    [
        {"access_key": SECRET},
        {"endpoint": f"http://user:{SECRET}@host"},
        {"storage_options": {"key": SECRET}},
        {"storage_options": [SECRET]},
        {"client_kwargs": {"deep": {"er": SECRET}}},
        {"token": SECRET.encode()},
    ],
)
def test_a_secret_in_an_option_is_in_no_message(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # where nobody listens
    assert SECRET not in everything_said("s3://bucket", **options)
    assert SECRET not in everything_said({"url": "s3://bucket", **options})


def test_the_backend_still_gets_what_is_not_shown() -> None:
    url = TierURL.parse(f"redis://user:{SECRET}%2F@host:6379/0?password={SECRET}")
    assert url.userinfo == f"user:{SECRET}%2F"
    assert url.location == "host:6379/0"
    assert url.raw_options == {"password": SECRET}


# What is shown can be opened

names = st.text(min_size=1, max_size=8).filter(lambda name: str(TierURL("x", "", None, {name: "v"})).endswith("=v"))
values = st.text(max_size=12).filter(lambda value: "//" not in value)
schemes = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)
paths = st.text(max_size=16).map(lambda path: "/" + path)
hosts = st.from_regex(r"[a-z0-9.-]{1,8}(:[0-9]{1,5})?|\[[0-9a-f:]{2,8}\](:[0-9]{1,5})?|\w{1,4}:\w{1,4}", fullmatch=True)


@given(st.none() | schemes, schemes, st.one_of(paths, hosts, st.tuples(hosts, paths).map("".join)),
       st.dictionaries(names, values, max_size=3))  # fmt: skip
@example(None, "file", "/100%41/é", {"capacity": "80%", "note": "80%41 +&=#?"})
@example(None, "memory", "a:b@c", {})
def test_a_url_without_secrets_reads_back_as_it_prints(
    form: str | None, scheme: str, location: str, options: dict[str, str]
) -> None:
    url = TierURL(scheme, location.replace("\0", ""), form, options)
    assert TierURL.parse(str(url)) == url
    assert str(TierURL.parse(str(url))) == str(url)


@given(schemes, hosts, st.text(min_size=1), st.text())
def test_a_users_part_is_never_printed(scheme: str, host: str, user: str, password: str) -> None:
    shown = str(TierURL(scheme, host, userinfo=f"{user}:{password}"))
    assert shown == str(TierURL(scheme, host)).replace("://", "://***@", 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2.5", 2.5), (3, 3.0), ("30s", 30.0), ("10min", 600.0), ("12h", 43200.0), ("7d", 604800.0)],
)
def test_a_duration_is_a_number_of_seconds_or_says_its_unit(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "5 years", True, None, -1, float("inf"), float("nan")])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        parse_duration(text)
