"""From a URL to a client that has been heard: which one serves here, and what is wrong where none can."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from kvstore.errors import (
    InvalidOptionError,
    MissingDependencyError,
    StoreAccessError,
    StoreNotFoundError,
    StoreOpenError,
)
from kvstore.objects.faults import Kind, RequestFailed
from kvstore.objects.settings import CLIENT, ENDPOINT, TIMEOUT, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.objects.client import ObjectClient
    from kvstore.url import TierURL

__all__ = ["connect", "opened"]

_OBSTORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az")


def connect(url: TierURL) -> ObjectClient:
    """A client of one's own for what lies at the validated `url`, to be closed. Raises what `opened` raises."""
    return opened(url, Place.of(url))[0]


def opened(url: TierURL, place: Place) -> tuple[ObjectClient, Sequence[str]]:
    """A client for the tier at `url`, and the folders that stand directly below its root.

    Raises a `StoreOpenError` where the bucket is missing, the credentials are wrong, the region is another one or
    nobody answers, and a `ConfigurationError` where an option is wrong or a package is missing.
    """
    try:
        client = _client(url, place)
    except RequestFailed as failed:  # some connect when they are made
        raise _explained(url, place, failed) from failed
    try:
        return client, client.folders()
    except RequestFailed as failed:
        client.close()
        raise _explained(url, place, failed) from failed
    except BaseException:
        client.close()
        raise


def _client(url: TierURL, place: Place) -> ObjectClient:
    if place.scheme == "file":
        from kvstore.objects.directory_client import DirectoryClient

        return DirectoryClient(url)
    wanted = url.option(CLIENT)
    if wanted == "obstore" and place.scheme not in _OBSTORE_SCHEMES:
        raise InvalidOptionError(f"{url}: obstore serves {', '.join(_OBSTORE_SCHEMES)}; leave out client")
    if wanted != "fsspec" and place.scheme in _OBSTORE_SCHEMES:
        found = _obstore_client(url, place, insist=wanted == "obstore")
        if found is not None:
            return found
    if place.is_s3:
        if importlib.util.find_spec("s3fs") is None:
            raise MissingDependencyError(f'{place.scheme}:// needs obstore or s3fs: pip install "kvstore-tiers[s3]"')
        from kvstore.objects.s3fs_client import S3FsClient

        return S3FsClient(url, place)
    from kvstore.objects.fsspec_client import FsspecClient, is_paramiko

    if is_paramiko(place):
        from kvstore.objects.sftp_client import SftpClient

        return SftpClient(url, place)
    return FsspecClient(url, place)


def _obstore_client(url: TierURL, place: Place, *, insist: bool) -> ObjectClient | None:
    """None where it cannot be had and `insist` is False."""
    if importlib.util.find_spec("obstore") is None:
        if insist:
            raise MissingDependencyError(f'{url}: client=obstore needs obstore: pip install "kvstore-tiers[s3]"')
        return None
    from kvstore.objects.obstore_client import ObstoreClient, usable

    if not usable():
        if insist:
            raise StoreOpenError(
                f"{url}: this process was forked from one that uses obstore, whose threads no fork takes along: start"
                " it anew (multiprocessing: the spawn start method), or use client=fsspec"
            )
        return None
    try:
        return ObstoreClient(url, place)
    except InvalidOptionError:
        if insist or not url.raw_options.get("storage_options"):
            raise
        return None


def _explained(url: TierURL, place: Place, failed: RequestFailed) -> StoreOpenError:
    said = f" ({failed.detail})" if failed.detail else ""
    match failed.kind:
        case Kind.NO_BUCKET:
            where = url.option(ENDPOINT) or "the endpoint in use"
            return StoreNotFoundError(
                f"{url}: there is no bucket {place.bucket!r} at {where}: create it, or correct the name or endpoint"
                f"{said}"
            )
        case Kind.DENIED:
            return StoreAccessError(f"{url}: {failed.kind.value}: {_credentials_hint(place)}{said}")
        case Kind.WRONG_REGION:
            return StoreAccessError(f"{url}: the bucket is in another region: say which with region=…{said}")
        case Kind.UNREACHABLE | Kind.TIMEOUT | Kind.BUSY:
            return StoreOpenError(
                f"{url}: {failed.kind.value}: is the endpoint right, the server up, the network open? It was given"
                f" {url.option(TIMEOUT):g} s (timeout=…){said}"
            )
        case _:
            return StoreOpenError(f"{url} cannot be opened: {failed}")


def _credentials_hint(place: Place) -> str:
    if place.is_s3:
        return (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give profile=… or storage_options, or, for a public"
            " bucket, anonymous=true; the tier lists, reads, writes and deletes"
        )
    return "set the credentials that this kind of store reads from the environment, or give storage_options"
