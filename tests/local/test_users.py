"""Several users of one tier and their permissions, and what an opening says that does not work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore import open_store
from kvstore.errors import NotAStoreError
from kvstore.testing.supply import SPACE, writes

if TYPE_CHECKING:
    from pathlib import Path


def as_user(uid: int, url: str, numbers: range, umask: int = 0o077, group: int = 0) -> None:
    """Open, put, read and close in a process of that user, whose group is one of its own if none is given."""
    source = f"""
import kvstore, os, tempfile
from kvstore.testing.supply import SPACE, get, writes
scheme = {url!r}.split(":")[0]
with tempfile.TemporaryDirectory() as folder, kvstore.open_store(scheme + "://" + folder + "/t") as store:
    store.put_many(SPACE, writes([1])), get(store, [1])  # imports all that the user below may not be able to read
os.umask({umask}); os.setgroups([]); os.setresgid(*[{group or uid}] * 3); os.setresuid({uid}, {uid}, {uid})
with kvstore.open_store({url!r}) as store:
    print([outcome.name for outcome in store.put_many(SPACE, writes(range({numbers.start}, {numbers.stop})))])
    print([outcome.name for outcome in get(store, range({numbers.stop}))])
    print(store.delete_many(SPACE, [writes([0])[0].key]), store.put_many(SPACE, writes([0]))[0].name)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines() == [
        str(["STORED"] * len(numbers)),
        str(["HIT"] * numbers.stop),
        "[True] STORED",
    ], done.stderr


KILLED = """
import os, signal, sys
from pathlib import Path
from kvstore import open_store
from kvstore.catalog import address_of
from kvstore.testing.supply import SPACE, key
from kvstore_zarr.tier import pack_addresses
address = address_of(SPACE, key(1))
tier = open_store(sys.argv[1])._tier
with tier.catalog.write() as change:
    intent = change.reserve(tier.presence.lease, 1 << 20, pack_addresses([address]))
draft = Path(tier.draft(intent, 0, address))
for path in (draft, tier.root / ".kvstore" / "drafts" / (draft.name + "-document")):
    path.touch()
    path.chmod(0o600)  # as the umask leaves it until it is written
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestTwoUsers:
    @pytest.mark.parametrize("mode", ["0666", "0600"])
    @pytest.mark.parametrize("umask", [0o022, 0o077, 0])
    def test_everything_has_exactly_the_mode_that_was_asked_for(
        self, scheme: str, root: Path, mode: str, umask: int
    ) -> None:
        before = os.umask(umask)
        try:
            with open_store(f"{scheme}://{root}?mode={mode}") as store:
                store.put_many(SPACE, writes(range(3)))
                found = [root, *root.rglob("*")]
                modes = {path.is_dir(): path.stat().st_mode & 0o777 for path in found}
                assert {path.stat().st_mode & 0o777 for path in found} == set(modes.values())
        finally:
            os.umask(before)
        assert modes == {True: 0o777 if mode == "0666" else 0o700, False: int(mode, 8)}

    def test_who_may_write_need_not_own_and_an_opening_without_mode_shuts_nobody_out(
        self, scheme: str, open_folder: Path
    ) -> None:
        if os.geteuid() != 0:
            pytest.skip("two users take root")
        shared = open_folder / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        url = f"{scheme}://{shared}/tier"
        as_user(65533, f"{url}?mode=0666", range(5))
        as_user(65532, f"{url}?mode=0666", range(5, 10))
        as_user(65533, url, range(10, 15))
        as_user(65532, url, range(15, 20))
        as_user(65533, f"{url}?capacity=16MB", range(20, 25))
        as_user(65532, url, range(25, 30))

    def test_two_users_of_one_group_share_a_tier_and_nobody_else_does(self, scheme: str, open_folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("two users take root")
        shared, group = open_folder / "shared", 65530
        shared.mkdir()
        os.chown(shared, 0, group)
        shared.chmod(0o2770)  # as for any folder that a group works in: what is made there is the group's
        url = f"{scheme}://{shared}/tier"
        as_user(65533, f"{url}?mode=0660", range(5), group=group)
        as_user(65532, url, range(5, 10), group=group)
        as_user(65533, url, range(10, 15), group=group)
        found = [shared / "tier", *(shared / "tier").rglob("*")]
        assert {path.stat().st_mode & 0o007 for path in found} == {0}
        assert {path.stat().st_gid for path in found} == {group}
        with pytest.raises(AssertionError, match="StoreAccessError"):
            as_user(65531, url, range(15, 20))

    def test_what_a_killed_user_leaves_shuts_nobody_out(self, open_folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("two users take root")
        shared = open_folder / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        url = f"file://{shared}/tier?mode=0666"
        as_user(65533, url, range(5))
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, url],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL
        left = [*shared.rglob("draft-*")]
        assert len(left) == 2
        as_user(65532, url, range(5, 10))
        assert not [path for path in left if path.exists()]
        with open_store(url) as store:
            assert store.usage().reserved == 0


class TestWhatIsSaid:
    def test_a_dangling_link_is_called_one(self, scheme: str, root: Path) -> None:
        root.symlink_to("nowhere")
        with pytest.raises(NotAStoreError, match="dangling symlink to nowhere"):
            open_store(f"{scheme}://{root}")

    def test_too_little_address_space_is_told_from_memory(self, scheme: str, root: Path) -> None:
        source = f"""
import kvstore, resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
kvstore.open_store("{scheme}://{root}")
"""
        assert "ulimit -v" in said_by(source).splitlines()[-1]

    def test_a_path_that_the_locale_cannot_say(self, scheme: str, tmp_path: Path) -> None:
        source = f"import kvstore; kvstore.open_store('{scheme}://{tmp_path}/gr%C3%BCn')"
        said = said_by(source, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")
        assert said.splitlines()[-1].startswith("kvstore.errors.StoreAccessError"), said
        assert "PYTHONUTF8=1" in said.splitlines()[-1]


def said_by(source: str, **environment: str) -> str:
    """The error output of that program."""
    search = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **search, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stderr
