"""The options of the vLLM tier, as they stand in `secondary_tiers`: read once, when the engine starts.

vLLM passes every key of a tier's configuration as a keyword. What is not known here is an error that lists what is;
options of the URL (capacity, ttl, …) stand in the URL, or in a mapping called `options`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from kvstore.apart import is_shareable
from kvstore.errors import ConfigurationError, InvalidOptionError, UnknownOptionError
from kvstore.registry import backend_class
from kvstore.tiering import SecondaryTier
from kvstore.tiering.secondary import LOAD_TIMEOUT, NETWORK_LOAD_TIMEOUT
from kvstore.url import Option, TierURL, boolean, choice, parse_duration, parse_size

if TYPE_CHECKING:
    from kvstore.archive.warming import Warming
    from kvstore.namespace import Namespace

__all__ = ["KNOWN", "TierOptions"]

_log = logging.getLogger("kvstore.vllm")

DEFAULT_THREADS = 16
"""As many requests as keep an NVMe drive busy; they wait for it in the kernel. (vLLM's own `fs` tier has 32.)"""


def _url(text: Any) -> TierURL:
    return TierURL.parse(text)


def _urls(value: Any) -> tuple[TierURL, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError('expected a list such as ["s3://bucket/archives/handbook"]')
    return tuple(_url(url) for url in cast("list[Any]", value))


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError('expected a mapping such as {"capacity": "500GB"}')
    return cast("Mapping[str, Any]", value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def _seconds(value: Any) -> float:
    seconds = parse_duration(value)
    if not seconds:
        raise ValueError("expected a time above 0")
    return seconds


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a name, as text")
    return value


URL: Option[Any] = Option(
    "url", _url, None, "where the blocks are, such as file:///mnt/nvme/kv?capacity=500GB; required"
)
OPTIONS: Option[Mapping[str, Any]] = Option("options", _mapping, {}, "more options of the URL, as a mapping")
THREADS: Option[int] = Option("threads", _count, DEFAULT_THREADS, f"transfers side by side; default {DEFAULT_THREADS}")
BACKLOG: Option[int] = Option(
    "backlog", parse_size, 1 << 30, "bytes accepted and not yet stored, beyond which stores are shed: 4GB; default 1GiB"
)
LOOKUP_TIMEOUT: Option[float] = Option(
    "lookup_timeout", _seconds, 1.0, "time after which an unanswered lookup is a miss: 500ms; default 1s"
)
LOAD_TIMEOUT_OPTION: Option[float | None] = Option(
    "load_timeout",
    _seconds,
    None,
    "time after which a load is given up and its blocks are computed: 2s; default"
    f" {NETWORK_LOAD_TIMEOUT:.0f}s on a network, {LOAD_TIMEOUT:.0f}s on a local device",
)
STAGING: Option[int | None] = Option(
    "staging", parse_size, None, "memory for calls that can hang on a network: 1GB; default 256MiB, or 8 blocks"
)
LOCALITY: Option[str | None] = Option(
    "locality", choice("LOCAL", "REMOTE"), None, "LOCAL or REMOTE: what vLLM's load filters and KV events say of it"
)
EVENTS: Option[bool] = Option(
    "enable_kv_events", boolean, False, "true: announce each block that is stored, where vLLM publishes KV events"
)
NAMESPACE: Option[str | None] = Option(
    "namespace", _name, None, "a name for what may share blocks, in place of the engine's identity; engines must agree"
)
ARCHIVES: Option[tuple[TierURL, ...]] = Option(
    "archives",
    _urls,
    (),
    "a list of archives (URLs) that are restored into the tier from the start; see kvstore archive",
)

ALLOW_PINS: Option[bool] = Option(
    "allow_pins", boolean, True, "false: what requests say of pins is passed over; kvstore pin is the operator's"
)
IO_PROCESS: Option[bool | None] = Option(
    "io_process",
    boolean,
    None,
    "true: a process of its own moves the bytes, beside the engine's and its GIL; default: true on a network",
)

KNOWN: tuple[Option[Any], ...] = (
    URL,
    OPTIONS,
    THREADS,
    BACKLOG,
    LOOKUP_TIMEOUT,
    LOAD_TIMEOUT_OPTION,
    STAGING,
    LOCALITY,
    EVENTS,
    NAMESPACE,
    ARCHIVES,
    ALLOW_PINS,
    IO_PROCESS,
)
"""All of them; `type`, `module_path` and `backpressure` are vLLM's own."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What was chosen, checked; names as in the configuration."""

    url: TierURL
    threads: int
    backlog: int
    lookup_timeout: float
    load_timeout: float | None
    staging: int | None
    locality: str | None
    enable_kv_events: bool
    namespace: str | None
    archives: tuple[TierURL, ...]
    allow_pins: bool
    io_process: bool | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Raises a `ConfigurationError` that says which option is wrong, and what it could be."""
        unknown = sorted(given.keys() - {option.name for option in KNOWN})
        if unknown:
            raise UnknownOptionError(_unknown(unknown[0]))
        if given.get("url") is None:
            raise InvalidOptionError(f'the kvstore tier needs a url: {{"type": "kvstore", "url": …}} ({URL.help})')
        values = {option.name: _parsed(option, given) for option in KNOWN}
        url: TierURL = values.pop("url")
        return cls(url=TierURL.parse(url, **values.pop("options")), **values)

    def open(self, namespace: Namespace, memory: memoryview) -> SecondaryTier:
        """Open the store and start its threads, for slots in `memory`. Raises a `ConfigurationError` or a
        `StoreOpenError`.
        """
        try:
            return SecondaryTier(
                self.url,
                namespace,
                threads=self.threads,
                backlog_bytes=self.backlog,
                lookup_timeout=self.lookup_timeout,
                load_timeout=self.load_timeout,
                staging_bytes=self.staging,
                io_process=self._wants_process(memory),
                memory=memory,
            )
        except ValueError as error:
            if isinstance(error, ConfigurationError):
                raise
            raise InvalidOptionError(f"{self.url}: {error}") from error

    def _wants_process(self, memory: memoryview) -> bool:
        if self.io_process is not None:
            return self.io_process
        if not backend_class(self.url).remote:
            return False
        if not is_shareable(memory):
            _log.warning("%s: no process of its own moves its bytes, because vLLM's memory cannot be shared", self.url)
            return False
        return True

    def begin_warming(self, namespace: Namespace) -> Warming | None:
        """Begin to restore the archives in the background; None where there are none."""
        if not self.archives:
            return None
        from kvstore.archive.warming import Warming

        return Warming(self.url, namespace, self.archives)


def _parsed(option: Option[Any], given: Mapping[str, Any]) -> Any:
    if given.get(option.name) is None:  # a null in the JSON is the default
        return option.default
    try:
        return option.parse(given[option.name])
    except InvalidOptionError:
        raise
    except (ValueError, TypeError, OverflowError) as error:
        if option is URL:
            raise
        shown = "" if option is OPTIONS else f"={given[option.name]!r}"
        raise InvalidOptionError(f"the kvstore tier's option {option.name}{shown}: {error} ({option.help})") from None


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, [option.name for option in KNOWN], 1)
    guess = f", did you mean {close[0]!r}?" if close else "."
    listing = "".join(f"\n  {option.name}: {option.help}" for option in KNOWN)
    return (
        f"the kvstore tier has no option {name!r}{guess} Options of the URL stand in the URL, or in the mapping"
        f' "options". The tier\'s own:{listing}'
    )
