"""What every client shares: one layer of retries within a time, and nothing of a caller's held by an error."""

from __future__ import annotations

import gc
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore import open_store
from kvstore.errors import TierUnavailable
from kvstore.integrity import crc32c
from kvstore.objects import connect, obstore_client
from kvstore.objects.client import Arrived
from kvstore.objects.faults import Kind, RequestFailed, kind_of_status, readable
from kvstore.objects.fsspec_client import _kind
from kvstore.objects.settings import OPTIONS
from kvstore.objects.side import side_by_side
from kvstore.testing.proxy import FaultProxy, slow_down, times, truncating
from kvstore.testing.supply import SPACE, buffer, content, get, key, write
from kvstore.types import BlockWrite, GetOutcome
from kvstore.url import TierURL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore import BlockStore
    from kvstore.testing.servers import S3Server


def test_a_buffer_whose_put_failed_is_nobodys_but_the_callers(server: S3Server, place: str, client: str) -> None:
    with FaultProxy(server.port) as proxy, open_store(place, client=client, endpoint=proxy.endpoint) as store:
        store.put_many(SPACE, [write(0)])
        proxy.plan["PUT"] = slow_down
        given = np.array(content(1))
        seen = weakref.ref(given)
        gc.disable()
        try:
            assert is_refused(store, given)  # pytest.raises would hold the error, and the error the frames
            del given
            assert seen() is None
        finally:
            gc.enable()


def is_refused(store: BlockStore, given: NDArray[np.uint8]) -> bool:
    try:
        store.put_many(SPACE, [BlockWrite(key(1), buffer(given))])
    except TierUnavailable:
        return True
    return False


PARTS = (0, 3, 0, 70_000, 1)


@pytest.mark.parametrize("piece", [100, 4096, 1 << 20])
def test_an_object_is_read_into_the_callers_parts_in_pieces_or_at_once(
    server: S3Server, place: str, client: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(obstore_client, "WHOLE", piece)
    monkeypatch.setattr(obstore_client, "PIECE", piece)
    data = np.random.default_rng(7).integers(0, 256, sum(PARTS), np.uint8)
    with FaultProxy(server.port) as proxy:
        connection = connect(TierURL.parse(f"{place}?client={client}&endpoint={proxy.endpoint}").validated(OPTIONS))
        connection.put("it", [data], new=False)
        parts = [np.zeros(size, np.uint8) for size in PARTS]
        proxy.plan["GET"] = times(1, truncating(50_000))
        assert connection.get_into("it", parts) == Arrived(data.nbytes, 0)  # nothing comes into the first part
        assert np.concatenate(parts).tobytes() == data.tobytes()
        others = [np.zeros(size + 1, np.uint8) for size in PARTS]
        assert connection.get_into("it", others) == Arrived(data.nbytes)
        assert not any(part.any() for part in others)
        (whole,) = one = [np.zeros(data.nbytes, np.uint8)]
        assert connection.get_into("it", one) == Arrived(data.nbytes, crc32c(data))
        assert whole.tobytes() == data.tobytes()
        assert connection.get_into("other", parts) is None
        proxy.plan["GET"] = truncating(50_000)
        with pytest.raises(RequestFailed):
            connection.get_into("it", parts)
        connection.close()


def test_items_run_side_by_side_in_order_and_the_first_error_ends_them() -> None:
    begun: list[int] = []

    def call(item: int) -> int:
        begun.append(item)
        time.sleep(0.01)
        if item == 3:
            raise RequestFailed(Kind.BUSY, "by order")
        return item * item

    assert side_by_side(lambda item: item * item, range(100)) == [item * item for item in range(100)]
    with pytest.raises(RequestFailed, match="by order"):
        side_by_side(call, range(1000), width=4)
    assert len(begun) < 20


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "NoSuchKey", Kind.MISSING),
        (404, "NoSuchBucket", Kind.NO_BUCKET),
        (404, None, Kind.MISSING),
        (403, "SignatureDoesNotMatch", Kind.DENIED),
        (403, "RequestTimeTooSkewed", Kind.DENIED),
        (400, "AuthorizationHeaderMalformed", Kind.WRONG_REGION),
        (400, "ExpiredToken", Kind.DENIED),
        (301, "PermanentRedirect", Kind.WRONG_REGION),
        (412, "PreconditionFailed", Kind.EXISTS),
        (409, "OperationAborted", Kind.BUSY),
        (503, "SlowDown", Kind.BUSY),
        (502, None, Kind.BUSY),
        (507, "XMinioStorageFull", Kind.FULL),
        (501, "NotImplemented", Kind.UNSUPPORTED),
        (400, "InvalidRequest", Kind.REFUSED),
        (None, None, None),
    ],
)
def test_a_status_and_a_code_have_one_meaning(status: int | None, code: str | None, kind: Kind | None) -> None:
    assert kind_of_status(status, code) is kind


def test_a_body_that_was_cut_short_is_no_answer_of_the_server() -> None:
    """Aiohttp gives it the status 400, which a store would be left alone for, and no second try made."""
    aiohttp = pytest.importorskip("aiohttp")
    cut = aiohttp.ClientPayloadError("Response payload is not completed")
    cut.__cause__ = aiohttp.http_exceptions.ContentLengthError("received 100 of 69632 bytes")
    assert cut.__cause__.code == 400
    assert _kind(cut) is Kind.UNREACHABLE


def test_a_clients_message_is_shown_without_signatures_names_and_markup() -> None:
    said = readable(
        "Error performing GET https://me:pw@host/container/path?sv=1&sig=SECRET in 3ms - 403: <?xml version='1.0'?>\n"
        "<Error><Code>AuthenticationFailed</Code><RequestId>1</RequestId></Error>\n\nDebug source:\nsig=SECRET"
    )
    assert said == "Error performing GET https://***@host/container/path in 3ms - 403: AuthenticationFailed"


def test_a_store_is_served_again_after_many_errors(server: S3Server, place: str, client: str) -> None:
    with FaultProxy(server.port) as proxy, open_store(place, client=client, endpoint=proxy.endpoint) as store:
        store.put_many(SPACE, [write(0)])
        proxy.plan["GET"] = slow_down
        for _ in range(5):
            with pytest.raises(TierUnavailable):
                get(store, [0])
        proxy.plan.clear()
        assert get(store, [0]) == [GetOutcome.HIT]
