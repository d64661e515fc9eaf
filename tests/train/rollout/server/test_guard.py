"""What a server's guard lets through, asked as an ASGI application and over HTTP, and the token that servers have."""

import asyncio
import os
import socket
import sys

import pytest
import requests

from exgrpo.tools import serve
from exgrpo.train.common.errors import ConfigError
from exgrpo.train.rollout.engine import Request
from exgrpo.train.rollout.server import guard
from exgrpo.train.rollout.server.check import FRESH, ServerFacts, check_server
from exgrpo.train.rollout.server.client import ServerClient
from exgrpo.train.rollout.server.engine import ServerEngine
from exgrpo.train.rollout.server.guard import NAMES, TOKEN, Guard, server_token
from exgrpo.train.rollout.server.reply import ServerError
from tests.train import tiny
from tests.train.fakes import LoneWorld
from tests.train.rollout.server.test_client import CPU, PROMPT, SAMPLING, proper

SECRET = "0123456789-abcdefghij"


@pytest.fixture(autouse=True)
def file(monkeypatch, tmp_path):
    """Where the user's token would be; the environment has this one."""
    monkeypatch.delenv(NAMES, raising=False)
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.setattr(guard, "TOKEN_FILE", tmp_path / "token")
    return tmp_path / "token"


def asked(headers, *, method="POST", kind="http", address="10.1.2.3"):
    """The messages that a request gets; those of the application behind the guard are its own name."""
    sent = []

    async def behind(scope, receive, send):
        await send({"type": "behind"})

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": method, "server": (address, 8000), "path": "/update_weights"}
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers]
    if kind == "websocket":
        del scope["method"]
    asyncio.run(Guard(behind)(scope, None, send))
    return sent


def status(*headers, **options):
    """What a request with these headers gets: 200 where it is let through."""
    first = asked(headers, **options)[0]
    return 200 if first["type"] == "behind" else first["status"]


OWN = ("Host", "localhost:8000")
CONTENT = ("Content-Type", "application/json")
BEARER = ("Authorization", f"Bearer {SECRET}")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (("localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "rollouts:8000"), 200),
        (("10.1.2.3:8000",), 200),  # the address at which the request arrives
        (("10.9.9.9:8000", "evil.example", "evil.example:8000", "localhost.evil.example"), 403),
        (("localhost@evil.example", "evil.example@localhost", "localhost:8000/evil.example"), 403),
        (("localhost, evil.example", "localhost:port", "[::1", ""), 403),
    ],
)
def test_a_server_answers_to_its_own_names(hosts, expected, monkeypatch):
    monkeypatch.setenv(NAMES, "Rollouts,rollouts.example")
    assert {host: status(("Host", host), CONTENT, BEARER) for host in hosts} == dict.fromkeys(hosts, expected)


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_in_a_browser_get_nothing(method):
    for origin in ("http://evil.example", "null", "http://localhost:8000", "http://localhost:3000", ""):
        assert status(OWN, CONTENT, BEARER, ("Origin", origin), method=method) == 403


CONTENTS = {
    "application/json": 200,
    "Application/JSON; charset=utf-8": 200,
    "text/plain": 415,
    "text/plain; application/json": 415,
    "application/x-www-form-urlencoded": 415,
    "multipart/form-data": 415,
    "": 415,
}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_what_a_page_can_send_without_a_question_is_refused(method):
    found = {content: status(OWN, BEARER, ("Content-Type", content), method=method) for content in CONTENTS}
    assert found == CONTENTS


@pytest.mark.parametrize(
    ("headers", "method", "expected"),
    [
        ([CONTENT], "POST", 403),  # no host, and two of them
        ([OWN, ("Host", "evil.example"), CONTENT], "POST", 403),
        ([OWN, ("Sec-Fetch-Site", "none")], "GET", 200),  # what a person asks for, and what a page loads
        ([OWN, ("Sec-Fetch-Site", "same-origin")], "GET", 403),
        ([OWN, ("Sec-Fetch-Site", "same-site")], "GET", 403),
        ([OWN, ("Sec-Fetch-Site", "cross-site")], "GET", 403),
        ([OWN], "POST", 415),
        ([OWN, CONTENT, ("Content-Type", "text/plain")], "POST", 415),
        ([OWN], "GET", 200),
        ([OWN], "HEAD", 200),
    ],
)
def test_what_else_is_asked_of_a_request_that_has_the_token(headers, method, expected):
    assert status(*headers, BEARER, method=method) == expected


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_token_opens_every_route_and_nothing_else_does(method):
    right = [f"Bearer {SECRET}"], [f"bearer {SECRET}"]
    wrong = [], [""], [SECRET], ["Bearer "], [f"Bearer {SECRET}x"], [f"Bearer {SECRET[:-1]}"], [f"Basic {SECRET}"]
    for expected, several in ((200, right), (401, (*wrong, ["Bearer ä"], [f"Bearer {SECRET}", "Bearer wrong"]))):
        for given in several:
            assert status(OWN, CONTENT, *(("Authorization", value) for value in given), method=method) == expected


def test_what_is_no_request_over_http():
    assert asked([OWN, BEARER, ("Origin", "http://evil.example")], kind="websocket")[0]["type"] == "websocket.close"
    assert asked([OWN, BEARER], kind="websocket")[0]["type"] == "behind"
    assert asked([], kind="lifespan")[0]["type"] == "behind"


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
    bearer = dict([BEARER])
    for headers, expected in [
        (page, 403),
        ({**page, **bearer}, 403),
        ({**page, **bearer, "Host": "localhost"}, 403),
        (dict([CONTENT]), 401),
        ({"Content-Type": "text/plain", **bearer}, 415),
    ]:
        answer = requests.post(f"{fake.url}/update_weights", data=b"{}", headers=headers, timeout=30)
        assert answer.status_code == expected
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


def test_a_trainer_that_uses_another_name_hears_what_to_do(fakes, settings, monkeypatch):
    fake, getaddrinfo = fakes(), socket.getaddrinfo
    fake.guarded(address="10.1.2.3")
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: getaddrinfo("127.0.0.1", *rest, **more))
    client = ServerClient(fake.url.replace("127.0.0.1", "rollouts"), token=SECRET)
    with pytest.raises(ConfigError, match="refuses the trainer: 403 .*'rollouts:.*start it with --names and that name"):
        check_server(client, settings, CPU)


def test_ranks_take_the_token_of_the_first(fakes, settings, monkeypatch):
    """A rank on another machine has none in its environment."""
    fake = fakes()
    proper(fake, settings)
    fake.guarded()
    monkeypatch.delenv(TOKEN)
    facts = {fake.url: ServerFacts("gloo", 1, 8, FRESH)}

    class Second(LoneWorld):
        rank, size, is_main = 1, 2, False
        of_first = iter([None, SECRET, None, ("run", facts)])

        def gather(self, value):
            return [next(self.of_first), value]

    own = tiny.engine_settings(settings.source.path, max_tokens=8, servers=(fake.url,))
    engine = ServerEngine(own, Second())
    assert len(list(engine.generate([Request(PROMPT, 1, SAMPLING, 0)]))) == 1
    engine.close()


@pytest.mark.parametrize("place", ["variable", "file"])
@pytest.mark.parametrize("token", ["x" * 15, "ä" * 20, "with a space " * 2, "with\ttab" * 3, "line\nbreak" * 3])
def test_tokens_that_cannot_be_are_refused_without_being_shown(token, place, file, monkeypatch):
    monkeypatch.setenv(TOKEN, token if place == "variable" else "")
    file.touch(0o600)
    file.write_text(token)
    origin = TOKEN if place == "variable" else file
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
        with pytest.raises(ConfigError, match=rf"^{file}: others can read this secret: `chmod 600 {file}`$"):
            start()


def test_no_token_is_no_guard(monkeypatch):
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ConfigError, match=f"needs a token: set {TOKEN}"):
        Guard(None)


@pytest.mark.parametrize(
    ("host", "open_"),
    [("0.0.0.0", True), ("rollouts", True), ("127.0.0.2", False), ("::1", False)],
)
def test_a_server_knows_its_token_and_the_names_that_other_machines_call_it(host, open_):
    command, environment = serve.build(["builtin:arithmetic", "--host", host, "--names", "a", "b"], on_cpu=True)
    assert command[command.index("--middleware") + 1] == f"{Guard.__module__}.{Guard.__qualname__}"
    assert environment[TOKEN] == environment["VLLM_API_KEY"] == SECRET
    assert environment[NAMES].split(",")[:3] == ["a", "b", *([host] if open_ else [])]
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
