"""An HTTP server on loopback whose replies are given byte by byte."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

HOLD = object()  # in a list of parts: send nothing more


@dataclass
class PictureServer:
    """`answers`: what is sent for a path, in parts; `asked`: the heads of all requests."""

    answers: Mapping[str, bytes | list]
    asked: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str = "/", *, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head)
            answer = self.answers[head.split(" ")[1]]
            for part in answer if isinstance(answer, list) else [answer]:
                if part is HOLD:
                    await reader.read()  # until the client leaves
                    break
                writer.write(part)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def reply(body: bytes = b"", *, status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} OK", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(url: str, status: int = 302) -> bytes:
    return reply(status=status, location=url)


@asynccontextmanager
async def picture_server(
    answers: Mapping[str, bytes | list], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[PictureServer]:
    pictures = PictureServer(answers)
    server = await asyncio.start_server(pictures.answer, "127.0.0.1", 0, ssl=tls)
    pictures.port = server.sockets[0].getsockname()[1]
    try:
        yield pictures
    finally:
        server.close()
        await server.wait_closed()
