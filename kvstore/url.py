"""Tier URLs: `[format+]scheme://location[?options]`, parsed once, validated against what the backend understands.

    file:///mnt/nvme/kv?capacity=500GB       lmdb:///mnt/nvme/kv.lmdb        memory://tests

Options may also come as keywords, or as a mapping with a `url` entry (a JSON configuration). Nothing is logged and
skipped: an unknown option or a bad value is an error that names what is known. Credentials never appear in a message.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote

from kvstore.errors import InvalidOptionError, InvalidURLError, UnknownOptionError

__all__ = [
    "CAPACITY",
    "DURABILITY",
    "IO",
    "KEEP_FREE",
    "MODE",
    "READONLY",
    "Capacity",
    "Option",
    "TierURL",
    "boolean",
    "choice",
    "format_size",
    "kept_free",
    "local_path",
    "parse_duration",
    "parse_size",
]

T = TypeVar("T", covariant=True)

_URL = re.compile(
    r"(?:(?P<format>[a-z][a-z0-9]*)\+)?(?P<scheme>[a-z][a-z0-9.-]*(?:::[a-z][a-z0-9.-]*)*)://(?P<rest>.*)",
    re.DOTALL,
)
_HOST_AND_PORT = re.compile(r"[^:]*(?::[0-9]*)?|\[[0-9A-Fa-f:.]*\](?::[0-9]*)?")
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|pwd|token|key(?!ring$)|credential|auth|signature|bearer|cookie|connection_?string"
    r"|storage_?options|(?:^|_)sas(?:$|_)",
    re.IGNORECASE,
)
_KEY_SOURCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,39}|file:/.+", re.DOTALL)
_HIDDEN = "***"


@dataclass(frozen=True)
class Option(Generic[T]):
    """One option a backend understands. `parse` takes what was given and raises ValueError if it is bad."""

    name: str
    parse: Callable[[Any], T]
    default: T
    help: str


@dataclass(frozen=True, repr=False)
class TierURL:
    """A parsed tier URL. `location` is percent-decoded; `raw_options` are as given, `values` as parsed.

    `userinfo` is what stood before an `@` in the host part, as it was written (percent-encoded). It is kept out of
    `location`, of `str` and of `repr`, so that no message can show a password by accident.
    """

    scheme: str
    location: str
    format: str | None = None
    raw_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    values: Mapping[str, object] = field(default_factory=dict[str, object])
    userinfo: str | None = None

    @classmethod
    def parse(cls, url: str | Mapping[str, Any] | TierURL, /, **options: Any) -> TierURL:
        """Read a URL, a mapping with a `url` entry, or a TierURL; `options` come on top.

        The same option given twice, in whichever way, is an `InvalidOptionError`; a text that is no URL an
        `InvalidURLError`.
        """
        if isinstance(url, TierURL):
            return replace(url, raw_options=_merged(url.raw_options, options), values={})
        if isinstance(url, Mapping):
            given = {str(name): value for name, value in url.items()}
            text = given.pop("url", None)
            if not isinstance(text, str):
                raise InvalidURLError('a tier configuration needs an entry "url", e.g. {"url": "file:///mnt/nvme/kv"}')
            return cls.parse(text, **_merged(given, options))
        match = _URL.fullmatch(_text(url))
        if match is None:
            raise InvalidURLError(_not_a_url(url))
        head, _, query = match["rest"].partition("?")
        userinfo, location = _split_location(match["scheme"], head)
        plain = cls(match["scheme"], location, match["format"], userinfo=userinfo)
        return replace(plain, raw_options=_merged(_split_query(plain, query), options))

    def validated(self, known: Sequence[Option[object]]) -> TierURL:
        """The same URL with every option parsed. Raises `UnknownOptionError` or `InvalidOptionError`."""
        by_name = {option.name: option for option in known}
        values: dict[str, object] = {option.name: option.default for option in known}
        for name, value in self.raw_options.items():
            if name not in by_name:
                raise UnknownOptionError(self._unknown(name, known))
            try:
                values[name] = by_name[name].parse(value)
            except (ValueError, TypeError, OverflowError) as error:
                secret = _SECRET_NAME.search(name)
                what = f"{name}: bad value" if secret else f"{name}={_shown(name, value)!r}: {_no_userinfo(str(error))}"
                raise InvalidOptionError(f"{self}: option {what} ({by_name[name].help})") from None
        return replace(self, values=values)

    def _unknown(self, name: str, known: Sequence[Option[object]]) -> str:
        close = difflib.get_close_matches(name, [option.name for option in known], 1)
        guess = f", did you mean {close[0]!r}?" if close else "."
        listing = "".join(f"\n  {option.name}: {option.help}" for option in known) or " no options"
        return f"{self}: unknown option {name!r}{guess} {self.scheme}:// knows:{listing}"

    def option(self, option: Option[T]) -> T:
        """The parsed value of `option`; its default where it was not given (or the URL was not validated)."""
        return cast("T", self.values.get(option.name, option.default))

    def __str__(self) -> str:
        """The URL with credentials redacted: fit for logs and messages, not for opening.

        Where there was nothing to redact, `TierURL.parse` reads it back as the same URL.
        """
        prefix = f"{self.format}+{self.scheme}" if self.format else self.scheme
        user = f"{_HIDDEN}@" if self.userinfo is not None else ""
        host, slash, path = self.location.partition("/")
        shown_host = quote(host, safe="[]:" if _HOST_AND_PORT.fullmatch(host) else "")
        options = "&".join(
            f"{_quoted(name)}={_quoted(_shown(name, value))}" for name, value in self.raw_options.items()
        )
        query = f"?{options}" if options else ""
        return f"{prefix}://{user}{shown_host}{slash}{quote(path, safe='/:@+,=~')}{query}"

    def __repr__(self) -> str:
        return f"TierURL({str(self)!r})"


def _text(url: object) -> str:
    if not isinstance(url, str):
        raise InvalidURLError(
            f"a tier URL is text such as 'file:///mnt/nvme/kv', not {type(url).__name__} (a Path has as_uri())"
        )
    if any("\ud800" <= letter <= "\udfff" for letter in url):
        raise InvalidURLError(f"{_redact(url)!r} is no Unicode text: a location whose name is not UTF-8 has no URL")
    return url


def _not_a_url(text: str) -> str:
    return f"{_redact(text)!r} is not a tier URL: scheme://location[?options], the scheme in lower case{_instead(text)}"


def _instead(text: str) -> str:
    """What was probably meant; nothing where that could show a password."""
    scheme, found, rest = text.partition(":")
    if found and rest.startswith("//") and _URL.fullmatch(f"{scheme.lower()}://"):
        return f'; write "{scheme.lower()}://" instead of "{scheme}://"'
    if "://" in text or {"@", "?"} & set(text):
        return ""
    if found and rest.startswith("/") and _URL.fullmatch(f"{scheme}://"):
        return f'; write "{scheme}://{quote(rest)}" with three slashes'
    path = os.path.expanduser(text)  # noqa: PTH111 - Path's own raises where there is no such user
    return f'; for a local folder write "file://{quote(str(Path(path).absolute()))}"'


def _split_location(scheme: str, head: str) -> tuple[str | None, str]:
    """The user part as written, and the rest percent-decoded."""
    authority, slash, path = head.partition("/")
    userinfo, at, host = authority.rpartition("@")
    if not _HOST_AND_PORT.fullmatch(host):
        # A "/" or "?" in a password ends the host part early: what is left looks like a port that is no number.
        raise InvalidURLError(
            f"{scheme}://{_HIDDEN}: what follows the colon is not a port; in a user name or a password write"
            " / as %2F, ? as %3F and @ as %40, in a name : as %3A"
        )
    try:
        location = unquote(host + slash + path, errors="strict")
    except UnicodeDecodeError:
        raise InvalidURLError(
            f"{scheme}://{_redact(head)}: the percent-encoded bytes are not UTF-8 (a % that means itself is %25)"
        ) from None
    if "\0" in location:
        raise InvalidURLError(f"{scheme}://{_redact(head)}: a location cannot have a NUL byte (%00)")
    return (userinfo if at else None), location


def _split_query(url: TierURL, query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, errors="strict") if query else []
    except ValueError:
        raise InvalidURLError(
            f"{url}: what follows the ? are options, written name=value, joined by &, in percent-encoded UTF-8 (a ?"
            " that is part of the location is %3F)"
        ) from None
    for name, value in pairs:
        options = _merged(options, {name: value})
    return options


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    twice = sorted(first.keys() & second.keys())
    if twice:
        raise InvalidOptionError(f"option {twice[0]!r} was given twice: give it once, in the URL or beside it")
    return {**first, **second}


def _shown(name: str, value: object) -> str:
    """An option's value, fit for a message; what is not a plain value may hold anything and is not shown."""
    if _SECRET_NAME.search(name) or not isinstance(value, (str, int, float, Path)):
        return _HIDDEN
    if name.endswith("encryption") and not _KEY_SOURCE.fullmatch(str(value)):  # somebody wrote the key itself
        return _HIDDEN
    return str(value).lower() if isinstance(value, bool) else _no_userinfo(str(value))


def _quoted(text: str) -> str:
    """Percent-encoded, but `80%` stays readable: a % that no hex digits follow means itself."""
    return re.sub(r"%25(?![0-9A-Fa-f]{2})", "%", quote(text, safe="/:*,@"))


def _redact(text: str) -> str:
    """Text that could not be read as a URL, without whatever could be a user name, a password or an option."""
    text = text.partition("?")[0]
    return _no_userinfo(text) if "//" in text else re.sub(r"^.*@", f"{_HIDDEN}@", text, flags=re.DOTALL)


def _no_userinfo(text: str) -> str:
    return re.sub(r"//.*@", f"//{_HIDDEN}@", text, flags=re.DOTALL)


# Options that mean the same everywhere; a backend lists those it understands.

_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}

_DURATIONS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: Any) -> int:
    """Bytes from an int or from text such as `500GB` (10^9), `64MiB` (2^20), `4096`. Raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    # A fraction, because a float is off by whole bytes beyond 9 PB and overflows beyond that.
    size = int(Fraction(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ValueError("expected bytes such as 500GB, 64MiB or 1048576")
    return size


def format_size(count: float, *, exact: bool = False) -> str:
    """Bytes for people: `1.5 GB` (10^9); with `exact`, `1.5 GB (1500000000 bytes)`."""
    raw, units = f" ({count:.0f} bytes)" if exact and count >= 1000 else "", ("B", "kB", "MB", "GB", "TB")
    for unit in units:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}{raw}"
        count /= 1000
    return f"{count:.1f} PB{raw}"


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


def kept_free(url: TierURL, path: Path) -> int:
    """What `keep_free` says, in bytes, for a tier at the existing directory `path`.

    Raises `InvalidOptionError` where that is the whole disk: such a tier would only ever throw out what it has.
    """
    wanted = url.option(KEEP_FREE)
    nbytes, disk = 0 if wanted is None else wanted.resolve(path), shutil.disk_usage(path).total
    if nbytes >= disk > 0:  # 0: ramfs, say, does not tell
        raise InvalidOptionError(
            f"{url}: keep_free is {format_size(nbytes)}, and the disk has {format_size(disk)}: nothing could be stored;"
            " keep_free=5% leaves a twentieth of it free"
        )
    return nbytes


def parse_duration(text: Any) -> float:
    """Seconds from a number or from text such as `500ms`, `2.5`, `30s`, `10min`, `12h`, `7d`. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text) if isinstance(text, str) else None
    unit = _DURATIONS.get(match[2]) if match else None
    seconds = float(match[1]) * unit if match and unit else text
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise ValueError("expected a time such as 500ms, 30s, 10min, 12h or 7d")
    return float(seconds)


def choice(*allowed: str) -> Callable[[Any], str]:
    """A parser of options that are one of a few words."""

    def parse(text: Any) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return str(text)

    return parse


def boolean(text: Any) -> bool:
    """A parser of options that are true or false. Raises ValueError."""
    if isinstance(text, bool):
        return text
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if not isinstance(text, str) or text.lower() not in words:
        raise ValueError("expected true or false")
    return words[text.lower()]


def _mode(text: Any) -> int:
    octal = re.fullmatch(r"(?:0o)?[0-7]{1,4}", text) if isinstance(text, str) else None
    mode = int(text, 8) if octal else text
    if not isinstance(mode, int) or mode & ~0o777 or mode & 0o600 != 0o600:
        raise ValueError("expected octal file permissions that let the owner read and write, such as 0600 or 0660")
    return mode


CAPACITY: Option[Capacity | None] = Option(
    "capacity",
    Capacity.parse,
    None,
    "most bytes the tier may occupy: 500GB, 64MiB, or 80% of the disk; default: no cap",
)
KEEP_FREE: Option[Capacity | None] = Option(
    "keep_free",
    Capacity.parse,
    None,
    "space that the tier leaves free on its disk, whoever fills it: 20GB, or 5% of the disk; default: none",
)
DURABILITY: Option[str] = Option(
    "durability",
    choice("none", "fsync"),
    "none",
    "none (survives the process) or fsync (survives a power loss)",
)
IO: Option[str] = Option(
    "io", choice("auto", "direct", "buffered"), "auto", "auto, direct (O_DIRECT or fail) or buffered"
)
READONLY: Option[bool] = Option("readonly", boolean, False, "true: create, write, evict and remove nothing")
MODE: Option[int] = Option("mode", _mode, 0o600, "permissions of new files, octal; directories get the matching x bits")


def local_path(url: TierURL) -> Path:
    """The absolute path a local URL names. Raises `InvalidURLError` for a host name or a relative path."""
    if not url.location.startswith("/"):
        raise InvalidURLError(
            f"{url}: a local tier is written with three slashes and an absolute path, such as"
            f" {url.scheme}://{quote(str(_meant(url.location)))}"
        )
    return Path(url.location)


def _meant(location: str) -> Path:
    """The path behind a location that has none: this machine's name is left out, the home folder is put in."""
    host, _, path = location.partition("/")
    if host == "~":
        return Path.home() / path
    return Path("/", path if host in ("localhost", "127.0.0.1", "[::1]") else location)
