"""What stands between a client and a server: TLS, replies that come late, half or as others than the server gave."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

CHUNK = 256 << 10


@dataclass
class Between:
    """Passes everything on, but for what a test sets. Each setting is for one reply, and is gone then."""

    behind: int
    port: int = 0
    most: int | None = None
    """Of the next reply that is longer only so many bytes arrive; the rest when the client has sent something more."""
    ends: bool = False
    """Or never: the connection ends there."""
    instead_of_ok: bytes = b""
    """Arrives in place of the next +OK."""
    _kept: dict[asyncio.StreamWriter, bytes] = field(default_factory=dict)

    def _reply(self, writer: asyncio.StreamWriter, data: bytes) -> bytes:
        if self.instead_of_ok and data == b"+OK\r\n":
            data, self.instead_of_ok = self.instead_of_ok, b""
        if writer in self._kept:
            self._kept[writer] += data
            return b""
        if self.most is not None and len(data) > self.most:
            data, self._kept[writer] = data[: self.most], data[self.most :]
            self.most = None
        return data

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self.behind)
        asked = asyncio.create_task(self._ask(reader, writer, to_server))
        try:
            with suppress(OSError):
                while data := await server.read(CHUNK):
                    writer.write(self._reply(writer, data))
                    await writer.drain()
                    if self.ends and writer in self._kept:
                        break
        finally:
            asked.cancel()
            for end in (writer, to_server):
                with suppress(OSError):
                    end.close()
                    await end.wait_closed()

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, to_server: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                writer.write(self._kept.pop(writer, b""))
                to_server.write(data)
                await to_server.drain()
        to_server.close()


@contextmanager
def between(behind: int, tls: ssl.SSLContext | None = None) -> Iterator[Between]:
    """In front of the server at the port `behind`, on a port of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    here = Between(behind)

    async def start() -> asyncio.Server:
        return await asyncio.start_server(here.serve, "127.0.0.1", 0, ssl=tls)

    async def end() -> None:
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    here.port = server.sockets[0].getsockname()[1]
    try:
        yield here
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
