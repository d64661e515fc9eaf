"""Parts of a server that gives the same answers in every run, for any order of requests.

vLLM's own draws come from one generator per server, and its sums depend on what is computed in the same batch. Here
each answer is computed alone, with a seed that is a hash of its prompt and its number.
"""

import json
import zlib
from typing import Any

from exgrpo.train.rollout.server.worker import WorkerExtension

OPTIONS = (
    "--max-num-seqs=1",
    "--no-enable-prefix-caching",
    f"--middleware={__name__}.OneByOne",
    f"--worker-extension-cls={__name__}.LoneWorker",
)
"""Of `exgrpo.tools.serve`."""
SEQUENCES = 64
"""Answers to one prompt that a request may ask for."""


class LoneWorker(WorkerExtension):
    """Says that the server takes requests for several answers."""

    def rollout_facts(self) -> dict[str, Any]:
        return {**super().rollout_facts(), "sequences": SEQUENCES}


class OneByOne:
    """Middleware that makes a request for several answers several requests."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on; if it asks for answers, once for each, and give them together."""
        if not str(scope.get("path")).endswith("inference/v1/generate"):
            await self._app(scope, receive, send)
            return
        request = json.loads(await _body(receive))
        parameters = request["sampling_params"]
        seed = zlib.crc32(json.dumps(request["token_ids"]).encode())
        choices = []
        for sample in range(parameters["n"]):
            alone = {**parameters, "n": 1, "seed": seed + sample}
            one = {**request, "request_id": f"{request['request_id']}-{sample}", "sampling_params": alone}
            start, answer = await self._ask(scope, receive, one)
            if start["status"] != 200:
                break
            choices.append({**answer["choices"][0], "index": sample})
        await _give(send, start, {**answer, "choices": choices} if start["status"] == 200 else answer)

    async def _ask(self, scope: Any, receive: Any, request: dict[str, Any]) -> tuple[Any, Any]:
        """The head and the JSON of what the server answers."""
        content = json.dumps(request).encode()
        given = [{"type": "http.request", "body": content, "more_body": False}]
        sent: list[Any] = []

        async def replay() -> Any:
            return given.pop() if given else await receive()

        async def keep(message: Any) -> None:
            sent.append(message)

        await self._app({**scope, "headers": _headers(scope["headers"], content)}, replay, keep)
        return sent[0], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def _give(send: Any, start: Any, answer: Any) -> None:
    content = json.dumps(answer).encode()
    await send({**start, "headers": _headers(start["headers"], content)})
    await send({"type": "http.response.body", "body": content, "more_body": False})


def _headers(pairs: Any, content: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of a message with new content."""
    kept = [(name, value) for name, value in pairs if name != b"content-length"]
    return [*kept, (b"content-length", str(len(content)).encode())]
