"""Archives into a tier in the background, while an engine already serves: nothing of it waits or raises there.

A daemon thread restores one archive after the other. What cannot be restored is logged with its reason, and told by
`Warming.errors`; an engine then computes that prefix, as it would have anyway.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.abc import BlockStore
from kvstore.archive.matching import check_namespace
from kvstore.archive.reading import open_archive
from kvstore.archive.restoring import RestoreReport, restore_archive
from kvstore.errors import KVStoreError, StoreClosedError
from kvstore.registry import open_store
from kvstore.url import TierURL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.namespace import Namespace

__all__ = ["Warmed", "Warming"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of archives so far.

    `restored`: archives all of whose blocks the tier has now; `failed`: those of which it has not all, or none;
    `waiting`: those that are under way or still to come; `blocks`: what was written of them.
    """

    restored: int = 0
    failed: int = 0
    waiting: int = 0
    blocks: int = 0


class Warming:
    """Restores `archives`, in order, into `tier`: a URL, opened here a second time, or a store that stays yours.

    Begins at once. Every archive is checked against `namespace` first: one that is of no use there is an error that
    names each field that differs. Threads: any.
    """

    def __init__(
        self,
        tier: str | Mapping[str, Any] | TierURL | BlockStore,
        namespace: Namespace,
        archives: Sequence[str | Mapping[str, Any] | TierURL],
    ) -> None:
        self.archives = tuple(TierURL.parse(url) for url in archives)
        self.reports: list[RestoreReport] = []
        """Of those that were restored, as far as they were."""
        self.errors: dict[str, str] = {}
        """Of those that could not be: URL without credentials, and why."""
        self._tier, self._namespace = tier, namespace
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-warming", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether nothing is under way any more."""
        return not self._thread.is_alive()

    @property
    def warmed(self) -> Warmed:
        """What became of the archives so far."""
        done, reports, errors = self.done, self.reports[:], len(self.errors)
        complete = sum(report.complete for report in reports)
        return Warmed(
            restored=complete,
            failed=len(reports) - complete + errors,
            waiting=0 if done else max(0, len(self.archives) - len(reports) - errors),
            blocks=sum(report.restored for report in reports),
        )

    def wait(self, timeout: float) -> bool:
        """Wait until it is over; False if `timeout` seconds were not enough."""
        self._thread.join(timeout)
        return self.done

    def stop(self, timeout: float) -> bool:
        """End after what is under way, a shard at the most; False if that takes longer than `timeout` seconds."""
        self._stopping.set()
        return self.wait(timeout)

    def _run(self) -> None:
        store: BlockStore | None = None
        try:
            store = self._tier if isinstance(self._tier, BlockStore) else open_store(self._tier)
            for url in self.archives:
                if self._stopping.is_set():
                    break
                self._restore(url, store)
        except Exception as error:
            self.errors |= {str(url): str(error) for url in self.archives if str(url) not in self._told}
            log.warning("kvstore: no archive is restored: %s", error)
        finally:
            if store is not None and store is not self._tier:
                store.close()

    @property
    def _told(self) -> set[str]:
        return {*self.errors, *(report.archive.url for report in self.reports)}

    def _restore(self, url: TierURL, store: BlockStore) -> None:
        try:
            with open_archive(url) as archive:
                check_namespace(self._namespace, archive.namespace, archive.info.url)
                report = restore_archive(archive, store, stopped=self._stopping.is_set)
        except (KVStoreError, OSError) as error:
            if isinstance(error, StoreClosedError) and self._stopping.is_set():
                return
            self.errors[str(url)] = str(error)
            log.warning("kvstore: an archive is not restored: %s", error)
            return
        self.reports.append(report)
        log.info(
            "kvstore: %s: %d blocks restored, %d were there, %d damaged, %d refused",
            *(report.archive.url, report.restored, report.there, report.corrupt, report.refused),
        )
