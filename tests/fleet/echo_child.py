"""A model's process without a model: it reports like `firn.fleet.worker`, and starts immediately.

It streams `max_tokens` pieces for a chat, one per millisecond. Its model path decides how it loads:
"broken..." fails, and "gated:FILE" is loaded once the file exists.
"""

import asyncio
import json
import os
import sys
import threading


def orders():
    rest = b""
    while piece := os.read(0, 65536):
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)


class EchoProcess:
    def __init__(self, out):
        self.out = out
        self.n_open = 0
        self.stopping = asyncio.Event()

    def tell(self, **message):
        os.write(self.out, json.dumps(message).encode() + b"\n")

    def report(self):
        costs = {"bytes_per_token": 0, "bytes_per_row": 0, "live_peak": 0, "weights": 0}
        return {"calls": self.n_open, "computed": {}, **costs, "device_memory": 1 << 40}

    async def answer(self, reader, writer):
        self.n_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target = head.split(" ")[:2]
            length = [x for x in head.lower().split("\r\n") if x.startswith("content-length: ")]
            raw = await reader.readexactly(int(length[0].split(" ")[1]) if length else 0)
            body = json.loads(raw or b"{}")
            if target == "/v1/cache/stats":
                await self.whole(writer, {"open": self.n_open - 1})
            elif method == "DELETE" and "forgetful" in self.name:
                error = {"message": "the disk is full", "code": "cache_not_cleared"}
                await self.whole(writer, {"error": error}, status="503 Service Unavailable")
            elif method == "DELETE":
                await self.whole(writer, {"deleted": target})
            elif body.get("stream"):
                await self.stream(reader, writer, body)
            else:
                await asyncio.sleep(0.001 * body.get("max_tokens", 1))
                message = {"role": "assistant", "content": self.name}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                await self.whole(writer, {"choices": [choice], "model": self.name})
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.n_open -= 1
            writer.close()

    async def whole(self, writer, value, status="200 OK"):
        raw = json.dumps(value).encode()
        kind = "content-type: application/json"
        head = f"HTTP/1.1 {status}\r\n{kind}\r\ncontent-length: {len(raw)}"
        writer.write(head.encode() + b"\r\n\r\n" + raw)
        await writer.drain()

    async def stream(self, reader, writer, body):
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(head + b"\r\n\r\n")
        gone = asyncio.ensure_future(reader.read())
        for i in range(body.get("max_tokens", 1)):
            delta = {"choices": [{"index": 0, "delta": {"content": f"{self.name}{i} "}}]}
            piece = b"data: " + json.dumps(delta).encode() + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0.001)
            if gone.done():
                return
        end = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))
        await writer.drain()

    async def run(self, incoming):
        order = next(incoming)
        self.name = order["config"]["server.served_model_name"]
        loop = asyncio.get_running_loop()

        def listen():
            for each in incoming:
                if each["do"] == "stop":
                    loop.call_soon_threadsafe(self.stopping.set)
            os._exit(0)

        threading.Thread(target=listen, daemon=True).start()
        path = order["config"]["model.path"]
        if path.startswith("broken"):
            self.tell(event="failed", message="it is broken")
            return
        if order["task"] == "check":
            self.tell(event="checked")
            return
        while path.startswith("gated:") and not os.path.exists(path[6:]):
            await asyncio.sleep(0.005)
        await asyncio.start_unix_server(self.answer, order["socket"])
        self.tell(event="ready", model={"id": self.name}, report=self.report())
        await self.stopping.wait()
        while self.n_open:
            await asyncio.sleep(0.001)
        self.tell(event="ending")


async def main():
    await EchoProcess(int(sys.argv[1])).run(orders())


asyncio.run(main())
os._exit(0)
