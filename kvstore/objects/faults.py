"""What an object store's refusals mean: one exception with a kind, whichever client ran into it, fit to be shown.

A client turns whatever its library raises into a `RequestFailed`. From there on nobody looks at status codes: a missing
object is a miss, a passing fault is tried again (`client`), and what is left over is `TierUnavailable`. When the store
is opened, the kinds become errors that say what to do (`opening`).
"""

from __future__ import annotations

import enum
import re

from kvstore.errors import TierUnavailable

__all__ = ["Kind", "RequestFailed", "kind_of_status", "readable"]


class Kind(enum.Enum):
    """Why a request failed."""

    MISSING = "there is no such object"
    EXISTS = "there is an object already"
    NO_BUCKET = "there is no such bucket"
    DENIED = "the credentials are not accepted, or do not permit it"
    WRONG_REGION = "the bucket is in another region"
    FULL = "no space is left, or a quota is used up"
    UNSUPPORTED = "the store cannot do it"
    REFUSED = "the store refuses the request"
    UNREACHABLE = "the store cannot be reached"
    BUSY = "the store is overloaded or fails"
    TIMEOUT = "no answer in time"

    @property
    def passing(self) -> bool:
        """Whether the same request may well succeed in a moment."""
        return self in (Kind.UNREACHABLE, Kind.BUSY)


class RequestFailed(TierUnavailable):
    """One request failed. `detail` is what the client said, without credentials."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(f"{kind.value} ({detail})" if detail else kind.value)
        self.kind = kind
        self.detail = detail


_KINDS_BY_CODE = {
    Kind.MISSING: ("NoSuchKey", "BlobNotFound"),
    Kind.NO_BUCKET: ("NoSuchBucket", "ContainerNotFound"),
    Kind.EXISTS: ("PreconditionFailed", "ConditionalRequestConflict", "BlobAlreadyExists"),
    Kind.WRONG_REGION: (
        "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect",
    ),
    Kind.DENIED: (
        "AccessDenied", "AccountProblem", "AllAccessDisabled", "AuthenticationFailed", "ExpiredToken",
        "InvalidAccessKeyId", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
    ),
    Kind.FULL: ("InsufficientStorage", "QuotaExceeded", "StorageFull", "XMinioStorageFull", "EntityTooLarge"),
    Kind.UNSUPPORTED: ("NotImplemented", "MethodNotAllowed"),
    Kind.BUSY: ("InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling"),
}  # fmt: skip
_KIND_OF_CODE = {code: kind for kind, codes in _KINDS_BY_CODE.items() for code in codes}
_KIND_OF_STATUS = {
    301: Kind.WRONG_REGION,
    307: Kind.WRONG_REGION,
    401: Kind.DENIED,
    403: Kind.DENIED,
    404: Kind.MISSING,
    405: Kind.UNSUPPORTED,
    408: Kind.BUSY,
    409: Kind.EXISTS,
    412: Kind.EXISTS,
    413: Kind.FULL,
    429: Kind.BUSY,
    501: Kind.UNSUPPORTED,
    507: Kind.FULL,
}


def kind_of_status(status: int | None, code: str | None = None) -> Kind | None:
    """The kind behind an HTTP status and, where the body has one, the store's own error code."""
    if code in _KIND_OF_CODE:
        return _KIND_OF_CODE[code]
    if status is None:
        return None
    return _KIND_OF_STATUS.get(status, Kind.BUSY if status >= 500 else Kind.REFUSED)


_QUERY = re.compile(r"\?[^\s\"'<>),]*")
_USERINFO = re.compile(r"//[^/\s@]*@")
_MARKUP = re.compile(r"<\?xml[^>]*>|<RequestId>.*?</RequestId>|<HostId>.*?</HostId>|</?[A-Za-z0-9]+(?: [^>]*)?/?>")
_LONGEST = 300


def readable(text: str) -> str:
    """A client's message on one line, without query strings (signatures), user names, markup and debug output."""
    text = text.partition("\n\nDebug source:")[0]
    text = _USERINFO.sub("//***@", _QUERY.sub("", _MARKUP.sub(" ", text)))
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
