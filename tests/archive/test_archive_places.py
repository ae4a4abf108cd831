"""No archive stands in a tier, and no tier in an archive: who removes the one would take the other along."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kvstore import open_store
from kvstore.archive import create, open_archive, restore
from kvstore.archive.overlapping import check_apart
from kvstore.archive.places import ArchivePlace
from kvstore.errors import ConfigurationError, NotAStoreError
from kvstore.testing.supply import SPACE, keys, writes
from kvstore.url import TierURL

if TYPE_CHECKING:
    from pathlib import Path

_numbers = itertools.count()


@pytest.fixture(params=["file", "remote", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Where tiers and archives are, and the options of a tier."""
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return server.url(f"places-{next(_numbers)}"), "?lookup_ttl=0"
    return f"file://{tmp_path}", "?remote=true&lookup_ttl=0" if request.param == "remote" else ""


def test_an_archive_is_made_beside_a_tier_and_in_none(base: tuple[str, str]) -> None:
    where, options = base
    with open_store(f"{where}/kv{options}") as store, open_store(f"{where}/other{options}") as other:
        store.put_many(SPACE, writes(range(3)))
        other.put_many(SPACE, writes(range(3)))
        for place in ("kv", "kv/ars", "kv/ars/a", "other/ars", f"other/{SPACE.name}/ars", ""):
            with pytest.raises(ConfigurationError, match="take the other along"):
                create(f"{where}/{place}", store, SPACE, keys(range(3)))
        create(f"{where}/ars/a", store, SPACE, keys(range(3)))
        assert restore(f"{where}/ars/a", other).there == 3


def test_a_folder_that_is_only_named_like_a_namespace_is_no_tier(base: tuple[str, str]) -> None:
    where, options = base
    named = f"{where}/0123456789abcdef0123456789abcdef"
    with open_store(f"{where}/kv{options}") as store:
        store.put_many(SPACE, writes(range(3)))
        create(named, store, SPACE, keys(range(3)))
        create(f"{named}/a", store, SPACE, keys(range(3)))
        create(f"{named}/ars/of/a", store, SPACE, keys(range(3)))
    with open_archive(f"{named}/a") as archive:
        assert archive.verify().ok


@pytest.mark.parametrize("deep", ["", "/g0", "/g0/ab"])
def test_no_archive_is_made_in_the_folder_of_a_namespace(base: tuple[str, str], deep: str) -> None:
    where, options = base
    with open_store(f"{where}/kv{options}") as store, open_store("memory://") as other:
        store.put_many(SPACE, writes(range(3)))
        other.put_many(SPACE, writes(range(3)))
        with pytest.raises(ConfigurationError, match="take the other along"):
            create(f"{where}/kv/{SPACE.name}{deep}/a", other, SPACE, keys(range(3)))


@pytest.mark.parametrize(
    ("archive", "tier", "apart"),
    [
        ("s3://b/kv/a", "s3a://b/kv", False),
        ("gs://b/kv/a", "gcs://b/kv", False),
        ("gcs://b/kv", "gs://b/kv/x", False),
        ("sftp://host/kv/a", "ssh://host/kv", False),
        ("file:///nowhere/../kv/a", "zarr+local:///kv", False),
        ("s3://b/kv/a", "gs://b/kv", True),
        ("s3://b/kv-ars/a", "s3a://b/kv", True),
        ("file:///kv/a", "zarr+s3://kv", True),
    ],
)
def test_one_place_under_two_names_is_one(archive: str, tier: str, apart: bool) -> None:
    place, url = ArchivePlace.of(archive), TierURL.parse(tier)
    if apart:
        check_apart(place, url)
        return
    with pytest.raises(ConfigurationError, match="stands within"):
        check_apart(place, url)


def test_an_archive_is_not_restored_into_itself(base: tuple[str, str]) -> None:
    where, options = base
    with open_store(f"{where}/kv{options}") as store:
        store.put_many(SPACE, writes(range(3)))
        create(f"{where}/ars/a", store, SPACE, keys(range(3)))
    for place in ("ars/a", "ars/a/kv"):
        with (
            pytest.raises((ConfigurationError, NotAStoreError)),
            open_store(f"{where}/{place}{options}") as inside,
        ):
            restore(f"{where}/ars/a", inside)
    with open_archive(f"{where}/ars/a") as archive:
        assert archive.verify().ok


def test_no_tier_is_opened_where_an_archive_stands(base: tuple[str, str]) -> None:
    where, options = base
    with open_store(f"{where}/kv{options}") as store:
        store.put_many(SPACE, writes(range(3)))
        create(f"{where}/ars/a", store, SPACE, keys(range(3)))
    with pytest.raises(NotAStoreError):
        open_store(f"{where}/ars/a{options}")
