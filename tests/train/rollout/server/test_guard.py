"""What a server's guard lets through, asked as an ASGI application and over HTTP, and the token that servers have."""

import asyncio
import os
import sys

import pytest
import requests

from exgrpo.tools import serve
from exgrpo.train.common.distributed import World
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.rollout.engine import Request
from exgrpo.train.rollout.server import guard
from exgrpo.train.rollout.server.check import FRESH, ServerFacts, check_server
from exgrpo.train.rollout.server.client import ServerClient, ServerError
from exgrpo.train.rollout.server.engine import ServerEngine
from exgrpo.train.rollout.server.guard import TOKEN, Guard, server_token
from tests.train import tiny
from tests.train.rollout.server.test_client import CPU, PROMPT, SAMPLING, proper

SECRET = "0123456789-abcdefghij"


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path):
    """Where the user's token would be; the environment has this one."""
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setattr(guard, "TOKEN_FILE", tmp_path / "token")
    return tmp_path / "token"


BEARER = f"Bearer {SECRET}"


def asked(*tokens, kind="http"):
    """The type of what a request with these tokens gets first, or its status; "behind": it is let through."""
    sent = []

    async def behind(scope, receive, send):
        await send({"type": "behind"})

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost:8000"), *((b"authorization", token.encode()) for token in tokens)]
    scope = {"type": kind, "path": "/update_weights", **({} if kind == "lifespan" else {"headers": headers})}
    asyncio.run(Guard(behind)(scope, None, send))
    return sent[0].get("status", sent[0]["type"])


def test_the_token_opens_a_server_and_nothing_else_does():
    assert asked(BEARER) == asked(BEARER, kind="websocket") == asked(kind="lifespan") == "behind"
    wrong = [], [""], [SECRET], ["Bearer "], [f"{BEARER}x"], [BEARER[:-1]], [f"Basic {SECRET}"], ["Bearer ä"]
    for tokens in (*wrong, [BEARER, "Bearer wrong"], [BEARER, BEARER]):
        assert asked(*tokens) == 401
        assert asked(*tokens, kind="websocket") == "websocket.close"


def test_over_http_a_page_is_refused_and_the_client_is_not(fakes):
    fake, other = fakes(), fakes()
    fake.guarded()
    fake.answers |= {"update_weights": {"done": True}, "weight_info": {"weight_version": "run-1"}, "resume": {}}
    client = ServerClient(fake.url, token=SECRET)
    assert client.post("update_weights", {"update_info": {}}) == {"done": True}
    assert client.post("resume") == {}
    assert client.weight_version() == "run-1"
    done = list(fake.asked)
    page = {"Origin": "http://evil.example", "Host": "evil.example", "Content-Type": "text/plain"}
    for headers in (page, {"Content-Type": "application/json"}):
        answer = requests.post(f"{fake.url}/update_weights", data=b"{}", headers=headers, timeout=30)
        assert answer.status_code == 401
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert fake.asked == done  # nothing of it came through
    # A server that sends elsewhere is not followed.
    fake.answers["weight_info"] = (307, {"detail": "elsewhere"}, {"Location": f"{other.url}/weight_info"})
    with pytest.raises(ServerError, match="307"):
        client.weight_version()
    assert not other.asked


@pytest.mark.parametrize("token", ["", "another-token-than-this"])
def test_a_trainer_without_the_token_is_one_clear_error_before_training(token, fakes, settings):
    fake = fakes()
    proper(fake, settings)
    fake.guarded()
    remedy = f"set {TOKEN} to the same value for both, or copy .*token of the server's user to the trainer's"
    with pytest.raises(ConfigError, match=f"{fake.url} refuses the trainer: 401 .*{remedy}") as error:
        check_server(ServerClient(fake.url, token=token), settings, CPU)
    assert SECRET not in str(error.value)
    assert check_server(ServerClient(fake.url, token=SECRET), settings, CPU).workers == 1


def test_ranks_take_the_token_of_the_first(fakes, settings, monkeypatch):
    """A rank on another machine has none in its environment."""
    fake = fakes()
    facts = {fake.url: ServerFacts(**proper(fake, settings), label=FRESH)}
    fake.guarded()
    monkeypatch.delenv(TOKEN)

    of_first = iter([None, SECRET, None, ("run", facts)])

    class Second(World):
        def gather(self, value):
            return [next(of_first), value]

    own = tiny.engine_settings(settings.source.path, max_tokens=8, servers=(fake.url,))
    engine = ServerEngine(own, Second(1, 2, CPU, None))
    assert len(list(engine.generate([Request(PROMPT, 1, SAMPLING, 0)]))) == 1
    engine.close()


@pytest.mark.parametrize("place", ["variable", "file"])
@pytest.mark.parametrize("token", ["x" * 15, "ä" * 20, "with a space " * 2, "with\ttab" * 3, "line\nbreak" * 3])
def test_tokens_that_cannot_be_are_refused_without_being_shown(token, place, file, monkeypatch):
    monkeypatch.setenv(TOKEN, token if place == "variable" else "")
    file.touch(0o600)
    file.write_text(token)
    origin = TOKEN if place == "variable" else ".*/token"
    with pytest.raises(ConfigError, match=f"^{origin} must have at least 16 printable ASCII characters") as error:
        server_token()
    assert token not in str(error.value)


def test_the_first_server_makes_a_token_that_the_next_one_and_the_trainer_read(file, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN)
    assert server_token() == ""
    tokens = [serve.build(["builtin:arithmetic"], on_cpu=True)[1][TOKEN] for _ in range(2)]
    assert {*tokens, file.read_text().strip()} == {server_token()}
    assert len(tokens[0]) > 30
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]
    told = capsys.readouterr().out
    assert told.count(f"made a token for rollout servers in {file}: ") == 1
    assert tokens[0] not in told
    monkeypatch.setenv(TOKEN, SECRET)
    assert server_token() == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_file_that_others_can_read_is_refused_with_the_remedy(mode, file, monkeypatch):
    monkeypatch.delenv(TOKEN)
    file.write_text(SECRET)
    file.chmod(mode)
    for start in (server_token, lambda: serve.build(["builtin:arithmetic"], on_cpu=True)):
        with pytest.raises(ConfigError, match=r"/token: others can read this secret: `chmod 600 .*/token`$"):
            start()


def test_no_token_is_no_guard(monkeypatch):
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ConfigError, match=f"needs a token: set {TOKEN}"):
        Guard(None)


def test_a_server_knows_its_token():
    command, environment = serve.build(["builtin:arithmetic", "--host", "0.0.0.0"], on_cpu=True)
    assert command[command.index("--middleware") + 1] == f"{Guard.__module__}.{Guard.__qualname__}"
    assert environment[TOKEN] == environment["VLLM_API_KEY"] == SECRET
    assert not [part for part in command if SECRET in part]


@pytest.mark.parametrize("option", ["--api-key", "--api_key=abc", "--grpc"])
def test_options_around_the_guard_are_refused(option):
    with pytest.raises(ConfigError, match=f"^{option}: "):
        serve.build(["builtin:arithmetic", option], on_cpu=True)


def test_the_token_is_not_printed(monkeypatch, capsys):
    became = []
    monkeypatch.setattr(os, "execve", lambda *what: became.append(what))
    monkeypatch.setattr(serve, "_built_for_cpu", lambda: True)
    serve.main(["builtin:arithmetic"])
    ((program, _, environment),) = became
    assert program == sys.executable
    assert environment[TOKEN] == SECRET
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert f"{TOKEN}=..." in printed.out
