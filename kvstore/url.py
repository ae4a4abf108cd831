"""Tier URLs: `[format+]scheme://location[?options]`, parsed once, validated against what the backend understands.

    file:///mnt/nvme/kv?capacity=500GB       lmdb:///mnt/nvme/kv.lmdb        memory://tests

Options may also come as keywords, or as a mapping with a `url` entry (a JSON configuration). Nothing is logged and
skipped: an unknown option or a bad value is an error that names what is known. Credentials never appear in a message.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode

from kvstore.errors import InvalidOptionError, InvalidURLError, UnknownOptionError

__all__ = [
    "CAPACITY",
    "DURABILITY",
    "IO",
    "MODE",
    "READONLY",
    "Capacity",
    "Option",
    "TierURL",
    "local_path",
    "parse_size",
]

T = TypeVar("T", covariant=True)

_URL = re.compile(
    r"(?:(?P<format>[a-z][a-z0-9]*)\+)?(?P<scheme>[a-z][a-z0-9.-]*(?:::[a-z][a-z0-9.-]*)*)://(?P<rest>.*)",
    re.S,
)
_SECRET = re.compile(r"(?:^|_)(secret|password|passwd|token|key|credential)s?(?:$|_)", re.IGNORECASE)


@dataclass(frozen=True)
class Option(Generic[T]):
    """One option a backend understands. `parse` takes what was given and raises ValueError if it is bad."""

    name: str
    parse: Callable[[Any], T]
    default: T
    help: str


@dataclass(frozen=True)
class TierURL:
    """A parsed tier URL. `location` is percent-decoded; `raw_options` are as given, `values` as parsed."""

    scheme: str
    location: str
    format: str | None = None
    raw_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    values: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)

    @classmethod
    def parse(cls, url: str | Mapping[str, Any] | TierURL, **options: Any) -> TierURL:
        """Read a URL, a mapping with a `url` entry, or a TierURL; `options` come on top.

        The same option given twice, in whichever way, is an `InvalidOptionError`; a text that is no URL an
        `InvalidURLError`.
        """
        if isinstance(url, TierURL):
            return cls(url.scheme, url.location, url.format, _merged(url.raw_options, options))
        if isinstance(url, Mapping):
            given = dict(url)
            text = given.pop("url", None)
            if not isinstance(text, str):
                raise InvalidURLError('a tier configuration needs an entry "url", e.g. {"url": "file:///mnt/nvme/kv"}')
            return cls.parse(text, **_merged(given, options))
        match = _URL.fullmatch(url)
        if match is None:
            hint = f'; for a local folder write "file://{quote(str(Path(url).absolute()))}"' if "://" not in url else ""
            raise InvalidURLError(f"{_redact(url)!r} is not a tier URL: scheme://location[?options]{hint}")
        location, mark, query = match["rest"].partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if mark and query else []
        except ValueError:
            raise InvalidURLError(f"{_redact(url)!r}: options are written name=value, joined by &") from None
        in_url: dict[str, Any] = {}
        for name, value in pairs:
            in_url = _merged(in_url, {name: value})
        return cls(match["scheme"], unquote(location), match["format"], _merged(in_url, options))

    def validated(self, known: Sequence[Option[object]]) -> TierURL:
        """The same URL with every option parsed. Raises `UnknownOptionError` or `InvalidOptionError`."""
        by_name = {option.name: option for option in known}
        values: dict[str, object] = {option.name: option.default for option in known}
        for name, value in self.raw_options.items():
            if name not in by_name:
                listing = "".join(f"\n  {option.name}: {option.help}" for option in known) or " none"
                raise UnknownOptionError(f"{self}: unknown option {name!r}. {self.scheme}:// knows:{listing}")
            try:
                values[name] = by_name[name].parse(value)
            except (ValueError, TypeError) as error:
                shown = "" if _SECRET.search(name) else f"={value!r}"
                raise InvalidOptionError(f"{self}: option {name}{shown}: {error} ({by_name[name].help})") from None
        return TierURL(self.scheme, self.location, self.format, self.raw_options, values)

    def option(self, option: Option[T]) -> T:
        """The parsed value of `option`; its default where it was not given (or the URL was not validated)."""
        return cast("T", self.values.get(option.name, option.default))

    def __str__(self) -> str:
        """The URL with credentials redacted: fit for logs and messages, not for opening."""
        prefix = f"{self.format}+" if self.format else ""
        shown = {name: "***" if _SECRET.search(name) else value for name, value in self.raw_options.items()}
        query = f"?{urlencode(shown, safe='/:%*')}" if shown else ""
        return f"{prefix}{self.scheme}://{_redact(self.location)}{query}"

    def __repr__(self) -> str:
        return f"TierURL({str(self)!r})"


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    twice = sorted(first.keys() & second.keys())
    if twice:
        raise InvalidOptionError(f"option {twice[0]!r} was given twice: leave it in the URL or beside it, not both")
    return {**first, **second}


def _redact(text: str) -> str:
    text = re.sub(r"(^|//)[^/@?]*@", r"\1***@", text)
    return re.sub(
        r"([?&][^=&]*(?:secret|password|passwd|token|key|credential)[^=&]*=)[^&]*", r"\1***", text, flags=re.I
    )


# Options that mean the same everywhere; a backend lists those it understands.

_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def parse_size(text: Any) -> int:
    """Bytes from an int or from text such as `500GB` (10^9), `64MiB` (2^20), `4096`. Raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS or float(match[1]) <= 0:
        raise ValueError("expected bytes such as 500GB, 64MiB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True)
class Capacity:
    """A cap in bytes, or as a share of the disk that holds the tier."""

    bytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: Any) -> Capacity:
        """From `500GB` or `80%`."""
        if isinstance(text, Capacity):
            return text
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text) if isinstance(text, str) else None
        if match is None:
            return cls(bytes=parse_size(text))
        if not 0 < float(match[1]) <= 100:
            raise ValueError("a share of the disk is above 0% and at most 100%")
        return cls(share=float(match[1]) / 100)

    def resolve(self, path: Path) -> int:
        """The cap in bytes, for a tier at the existing directory `path`."""
        if self.bytes is not None:
            return self.bytes
        return int(shutil.disk_usage(path).total * (self.share or 1.0))


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(text: Any) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return str(text)

    return parse


def _boolean(text: Any) -> bool:
    if isinstance(text, bool):
        return text
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if not isinstance(text, str) or text.lower() not in words:
        raise ValueError("expected true or false")
    return words[text.lower()]


def _mode(text: Any) -> int:
    mode = int(text, 8) if isinstance(text, str) else int(text)
    if mode & ~0o777 or mode & 0o600 != 0o600:
        raise ValueError("expected octal file permissions that let the owner read and write, such as 0600 or 0660")
    return mode


CAPACITY: Option[Capacity | None] = Option(
    "capacity",
    Capacity.parse,
    None,
    "most bytes the tier may occupy: 500GB, 64MiB, or 80% of the disk; default: no cap",
)
DURABILITY: Option[str] = Option(
    "durability",
    _choice("none", "fsync"),
    "none",
    "none (survives the process) or fsync (survives a power loss)",
)
IO: Option[str] = Option(
    "io", _choice("auto", "direct", "buffered"), "auto", "auto, direct (O_DIRECT or fail) or buffered"
)
READONLY: Option[bool] = Option("readonly", _boolean, False, "true: create, write, evict and remove nothing")
MODE: Option[int] = Option("mode", _mode, 0o600, "permissions of new files, octal; directories get the matching x bits")


def local_path(url: TierURL) -> Path:
    """The absolute path a local URL names. Raises `InvalidURLError` for a host name or a relative path."""
    if not url.location.startswith("/"):
        raise InvalidURLError(
            f"{url}: a local tier is written with three slashes and an absolute path, such as"
            f" {url.scheme}://{Path('/', url.location)}"
        )
    return Path(url.location)
