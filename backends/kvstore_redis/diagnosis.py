"""What `kvstore doctor` says of a Redis or Valkey server: who it is, what bounds it, and what survives a restart."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from kvstore.doctor import Finding, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvstore.types import Usage
    from kvstore.url import TierURL

__all__ = ["diagnose"]


def diagnose(url: TierURL, host: str, client: Any, usage: Usage | None) -> Iterator[Finding]:
    """For `RedisStore.diagnose`; `host` is the URL's, and `client` is closed at the end."""
    del usage
    try:
        facts: Mapping[str, Any] = client.info()
    except RedisError as error:
        yield problem("server", f"it cannot be asked: {error}", "look at the address, the network and the credentials")
        return
    finally:
        client.close()
    name = "Valkey" if "valkey_version" in facts else "Redis"
    yield ok("server", f"{name} {facts.get('valkey_version') or facts.get('redis_version')}")
    yield _memory(facts)
    yield _persistence(facts)
    yield _network(url, host)


def _memory(facts: Mapping[str, Any]) -> Finding:
    most, policy = int(facts.get("maxmemory", 0)), str(facts.get("maxmemory_policy", "noeviction"))
    if not most:
        remedy = "set maxmemory, and maxmemory-policy allkeys-lru"
        return warning("memory", "not bounded: it grows until the machine has none left", remedy)
    if policy == "noeviction":
        found = f"bounded at {most} bytes, and nothing is evicted: a full server stores nothing"
        return warning("memory", found, "set maxmemory-policy allkeys-lru, or give the tier a ttl")
    return ok("memory", f"bounded at {most} bytes; {policy} decides what goes")


def _persistence(facts: Mapping[str, Any]) -> Finding:
    if facts.get("aof_enabled"):
        return ok("persistence", "an append-only file: blocks survive a restart of the server")
    return ok("persistence", "no append-only file: a restart of the server may lose blocks, which are computed again")


def _network(url: TierURL, host: str) -> Finding:
    if url.scheme in ("rediss", "valkeys"):
        return ok("network", "TLS")
    if _is_here(host):
        return ok("network", "this machine")
    return warning(
        "network", "not encrypted: whoever can listen can read blocks, and so prompts", f"{url.scheme}s:// and TLS"
    )


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
