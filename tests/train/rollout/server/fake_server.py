"""A server that gives what a test wants."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from exgrpo.train.rollout.server.check import FRESH
from exgrpo.train.rollout.server.guard import Guard


def choice(index, tokens=(7, 2), version=FRESH, reason="stop"):
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    versions = [{"version": version, "start": 0, "end": len(tokens)}]
    written = {"token_ids": list(tokens), "weight_versions": versions, "logprobs": {"content": content}}
    return {"index": index, "finish_reason": reason, **written}


def reply(*choices, cached=None):
    return {"choices": list(choices), "usage": {"prompt_tokens_details": cached and {"cached_tokens": cached}}}


class Listener(ThreadingHTTPServer):
    request_queue_size = 1000


class FakeServer:
    """Gives what `answers` has for a route: an object, a function of the request, or (status, object); else 404.

    A third part after the object has headers of the answer. Bytes are sent as they are.
    """

    def __init__(self):
        self.answers = {}
        self.asked, self.headers = [], []
        self._guard = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if refusal := fake._refusal(self.headers):
                    self.send(*refusal)
                    return
                route = self.path.strip("/")
                request = json.loads(body or b"{}")
                fake.asked.append((route, request))
                fake.headers.append(self.headers)
                answer = fake.answers.get(route, (404, {"detail": "Not Found"}))
                answer = answer(request) if callable(answer) else answer
                status, given, *headers = answer if isinstance(answer, tuple) else (200, answer)
                if status is None:  # hang up
                    self.close_connection = True
                    return
                self.send(status, given if isinstance(given, bytes) else json.dumps(given).encode(), *headers)

            def send(self, status, text, headers=None):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Connection", "close")  # as uvicorn does where it was asked to
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer

            def log_message(self, *arguments):
                pass

        self._server = Listener(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def guarded(self):
        """From now on only requests that the guard lets through are answered."""
        self._guard = Guard(_behind)

    def _refusal(self, headers):
        """Status and text that the guard answers with, where it does."""
        if self._guard is None:
            return None
        sent = []

        async def send(message):
            sent.append(message)

        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        asyncio.run(self._guard({"type": "http", "headers": pairs}, None, send))
        return (sent[0]["status"], sent[1]["body"]) if sent else None

    def generates(self, answer):
        self.answers["inference/v1/generate"] = answer

    def requests(self, route="inference/v1/generate"):
        return [request for asked, request in self.asked if asked == route]

    def close(self):
        self._server.shutdown()
        self._server.server_close()


async def _behind(scope, receive, send):
    """The application behind the guard, which is the fake itself."""
