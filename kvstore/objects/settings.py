"""The options of tiers in object stores and other file systems, and what follows from them for a client.

Credentials never stand in a URL. They come from the standard environment variables, from a profile, from the machine's
role, or from the mapping `storage_options`; whichever client is in use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvstore.errors import InvalidOptionError, InvalidURLError
from kvstore.retention import TTL, TTL_FROM
from kvstore.sealing import SEALING
from kvstore.url import CAPACITY, DURABILITY, MODE, READONLY, Option, boolean, choice, parse_duration

if TYPE_CHECKING:
    from kvstore.url import TierURL

__all__ = [
    "CLIENT",
    "LOOKUP_TTL",
    "OPTIONS",
    "OPTIONS_OF_DIRECTORIES",
    "REMOTE",
    "S3_SCHEMES",
    "STORAGE_OPTIONS",
    "SWEEP",
    "TIMEOUT",
    "Place",
    "S3Settings",
]

S3_SCHEMES = ("s3", "s3a")
DEFAULT_TIMEOUT_S = 4.0
DEFAULT_REGION = "us-east-1"


def _endpoint(text: Any) -> str:
    if not isinstance(text, str) or not text.startswith(("http://", "https://")) or "@" in text or "?" in text:
        raise ValueError("expected http://host:port or https://host:port, without credentials")
    return text.rstrip("/")


def _word(text: Any) -> str:
    if not isinstance(text, str) or not text or not text.isprintable():
        raise ValueError("expected a name")
    return text


def _timeout(text: Any) -> float:
    seconds = parse_duration(text)
    if seconds < 0.1:
        raise ValueError("expected at least 100ms")
    return seconds


def _interval(text: Any) -> float:
    seconds = parse_duration(text)
    if not 1 <= seconds <= 30 * 86400:
        raise ValueError("expected a time from 1s to 30d, such as 1h")
    return seconds


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("expected a mapping, as a keyword or in a JSON configuration; it cannot stand in a URL")
    return {str(name): option for name, option in cast("Mapping[object, Any]", value).items()}


CLIENT: Option[str] = Option(
    "client", choice("auto", "obstore", "fsspec"), "auto", "auto (obstore where it serves), obstore or fsspec"
)
ENDPOINT: Option[str | None] = Option(
    "endpoint", _endpoint, None, "URL of an S3-compatible server; default: AWS_ENDPOINT_URL, or AWS itself"
)
REGION: Option[str | None] = Option(
    "region", _word, None, f"region of the bucket; default: AWS_REGION, the profile's, or {DEFAULT_REGION}"
)
ADDRESSING: Option[str] = Option(
    "addressing",
    choice("auto", "path", "virtual"),
    "auto",
    "where the bucket's name stands: path (endpoint/bucket) or virtual (bucket.endpoint); auto: path at an endpoint",
)
ANONYMOUS: Option[bool] = Option("anonymous", boolean, False, "true: requests are not signed (public buckets)")
PROFILE: Option[str | None] = Option("profile", _word, None, "profile of ~/.aws; default: AWS_PROFILE")
TIMEOUT: Option[float] = Option(
    "timeout", _timeout, DEFAULT_TIMEOUT_S, "most time one operation on one object may take: 4s, 500ms"
)
LOOKUP_TTL: Option[float] = Option(
    "lookup_ttl", parse_duration, 30.0, "how long a block that was seen is believed to be there: 30s; 0: not at all"
)
STORAGE_OPTIONS: Option[Mapping[str, Any]] = Option(
    "storage_options", _mapping, {}, "what else the file system takes, as a mapping: key, secret, token, …"
)
REMOTE: Option[bool] = Option(
    "remote", boolean, False, "file://: true for a directory that machines share (NFS, Lustre, CephFS); no catalogue"
)

SWEEP: Option[float | None] = Option(
    "sweep", _interval, None, "how often one of those who have the tier open removes what ttl and capacity say: 1h"
)

OPTIONS: tuple[Option[object], ...] = (
    *(CAPACITY, TTL, TTL_FROM, SWEEP),
    *(READONLY, CLIENT, TIMEOUT, LOOKUP_TTL),
    *SEALING,
    *(ENDPOINT, REGION, ADDRESSING, ANONYMOUS, PROFILE, STORAGE_OPTIONS),
)
_OF_S3 = (ENDPOINT, REGION, ADDRESSING, PROFILE)
OPTIONS_OF_DIRECTORIES: tuple[Option[object], ...] = (
    *(option for option in OPTIONS if option not in (CLIENT, ANONYMOUS, STORAGE_OPTIONS, *_OF_S3)),
    *(REMOTE, MODE, DURABILITY),
)


@dataclass(frozen=True, slots=True)
class Place:
    """What a URL of an object store names: `scheme` may be a chain (`simplecache::s3`), `prefix` is the tier's root."""

    scheme: str
    bucket: str
    prefix: str

    @classmethod
    def of(cls, url: TierURL) -> Place:
        """Raises `InvalidURLError` for a URL without a bucket, or with credentials where only names can stand."""
        bucket, _, prefix = url.location.partition("/")
        parts = [part for part in prefix.split("/") if part]
        place = cls(url.scheme, bucket, "/".join(parts))
        if place.is_s3 and not bucket:
            raise InvalidURLError(f"{url}: which bucket? Write {url.scheme}://bucket/prefix")
        if place.is_s3 and url.userinfo is not None:
            raise InvalidURLError(
                f"{url}: credentials do not belong in a URL: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass"
                " storage_options={'key': …, 'secret': …}"
            )
        if {".", ".."} & set(parts):
            raise InvalidURLError(f"{url}: a prefix has no parts called . or ..")
        if not url.location.isprintable():
            raise InvalidURLError(f"{url}: a prefix has no line breaks and nothing else that cannot be printed")
        given = [option.name for option in _OF_S3 if option.name in url.raw_options]
        if given and not place.is_s3:
            raise InvalidOptionError(
                f"{url}: {given[0]} is for s3://; say it in the file system's own words, in storage_options"
            )
        return place

    @property
    def is_s3(self) -> bool:
        """Whether the protocol is S3, and not a chain that ends there."""
        return self.scheme in S3_SCHEMES

    @property
    def is_readonly(self) -> bool:
        """Whether nothing can be written there at all."""
        return self.scheme.rpartition("::")[2] in ("http", "https")

    @property
    def root(self) -> str:
        """The root as fsspec's object stores write it: `bucket/prefix`."""
        return f"{self.bucket}/{self.prefix}".strip("/")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where a bucket is and who asks, for either client."""

    endpoint: str | None
    region: str
    path_style: bool
    anonymous: bool
    profile: str | None
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    rest: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """What else stood in `storage_options`: words of s3fs alone."""

    @classmethod
    def of(cls, url: TierURL, place: Place) -> S3Settings:
        """From the options, `storage_options` in the words of s3fs, the environment and the profile, in this order."""
        rest = dict(url.option(STORAGE_OPTIONS))
        profile = url.option(PROFILE) or rest.pop("profile", None)
        configured = _profile_settings(url, profile)
        endpoint = (
            url.option(ENDPOINT)
            or rest.pop("endpoint_url", None)
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or configured.get("endpoint_url")
        )
        region = (
            url.option(REGION)
            or os.environ.get("AWS_REGION")
            or os.environ.get("AWS_DEFAULT_REGION")
            or configured.get("region")
            or DEFAULT_REGION
        )
        addressing = url.option(ADDRESSING)
        return cls(
            endpoint=endpoint,
            region=region,
            # A name with dots is not covered by the certificate of *.s3.amazonaws.com.
            path_style=addressing == "path" or (addressing == "auto" and (endpoint is not None or "." in place.bucket)),
            anonymous=bool(url.option(ANONYMOUS) or rest.pop("anon", False)),
            profile=profile,
            key=rest.pop("key", None),
            secret=rest.pop("secret", None),
            token=rest.pop("token", None),
            rest=rest,
        )

    def session_credentials(self) -> Any | None:
        """The credentials of the profile, the environment, the files or the machine's role, by botocore.

        They renew themselves. None where there are none, or no botocore: the client then looks by itself.
        """
        session = _session(self.profile)
        return None if session is None else session.get_credentials()


_ENVIRONMENT_IS_ENOUGH = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


def _has_files() -> bool:
    names = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
    return any(Path(os.environ.get(name, path)).expanduser().exists() for name, path in names.items())


def _profile_settings(url: TierURL, profile: str | None) -> Mapping[str, str]:
    """`region` and `endpoint_url` of the profile (the default one without a name). Raises `InvalidOptionError`."""
    session = _session(profile)
    if session is None:
        if url.option(PROFILE):
            raise InvalidOptionError(f"{url}: profile needs botocore: pip install s3fs")
        return {}
    profile_not_found: Any = importlib.import_module("botocore.exceptions").ProfileNotFound
    try:
        found = cast("Mapping[str, Any]", session.get_scoped_config())
    except profile_not_found:
        known = ", ".join(sorted(session.available_profiles)) or "none"
        wanted = profile or os.environ.get("AWS_PROFILE")
        raise InvalidOptionError(f"{url}: there is no profile {wanted!r} in ~/.aws; there are: {known}") from None
    return {name: value for name in ("region", "endpoint_url") if isinstance(value := found.get(name), str)}


def _session(profile: str | None) -> Any | None:
    """What reads profiles, files and roles; None where there is nothing to read, or no botocore.

    It takes half a second to load: not where the environment says everything.
    """
    if profile is None and os.environ.keys() >= _ENVIRONMENT_IS_ENOUGH and not _has_files():
        return None
    try:
        botocore: Any = importlib.import_module("botocore.session")
    except ImportError:
        return None
    return botocore.Session(profile=profile)
