"""What a server's guard lets through, asked as an ASGI application and over HTTP, and what `serve` asks for."""

import asyncio
import os
import socket
import sys

import pytest
import requests

from exgrpo.train import serve
from exgrpo.train.errors import ConfigError
from exgrpo.train.rollout import Request
from exgrpo.train.rollout.server.check import FRESH, ServerFacts, check_server
from exgrpo.train.rollout.server.client import ServerClient
from exgrpo.train.rollout.server.engine import ServerEngine
from exgrpo.train.rollout.server.guard import NAMES, Guard
from exgrpo.train.rollout.server.reply import ServerError
from exgrpo.train.rollout.server.shared_token import TOKEN, server_token
from tests.train import tiny
from tests.train.fakes import LoneWorld
from tests.train.rollout.server.test_client import CPU, PROMPT, SAMPLING, proper

SECRET = "0123456789-abcdefghij"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in (TOKEN, NAMES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path):
    tiny.save_model(tmp_path, tied=True)
    return tiny.engine_settings(tmp_path, max_tokens=56)


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
    ("host", "expected"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3:8000", 200),  # the address at which the request arrives
        ("rollouts:8000", 200),
        ("10.9.9.9:8000", 403),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("localhost@evil.example", 403),
        ("evil.example@localhost", 403),
        ("localhost:8000/evil.example", 403),
        ("localhost, evil.example", 403),
        ("localhost:port", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_server_answers_to_its_own_names(host, expected, monkeypatch):
    monkeypatch.setenv(NAMES, "Rollouts,rollouts.example")
    assert status(("Host", host), CONTENT) == expected


def test_no_host_and_two_hosts_are_none():
    assert status(CONTENT) == 403
    assert status(OWN, ("Host", "evil.example"), CONTENT) == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:8000", "http://localhost:3000", ""]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_in_a_browser_get_nothing(origin, method, monkeypatch):
    assert status(OWN, CONTENT, ("Origin", origin), method=method) == 403
    monkeypatch.setenv(TOKEN, SECRET)
    assert status(OWN, CONTENT, BEARER, ("Origin", origin), method=method) == 403


@pytest.mark.parametrize(
    ("site", "expected"), [("none", 200), ("same-origin", 403), ("same-site", 403), ("cross-site", 403)]
)
def test_what_a_page_loads_is_not_given_and_what_a_person_asks_for_is(site, expected):
    assert status(OWN, ("Sec-Fetch-Site", site), method="GET") == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415),
        ("", 415),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_what_a_page_can_send_without_a_question_is_refused(content, expected, method):
    assert status(OWN, ("Content-Type", content), method=method) == expected


def test_content_without_a_type_is_refused_and_reading_needs_none():
    assert status(OWN) == 415
    assert status(OWN, CONTENT, ("Content-Type", "text/plain")) == 415
    assert status(OWN, method="GET") == status(OWN, method="HEAD") == 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([f"Bearer {SECRET}"], 200),
        ([f"bearer {SECRET}"], 200),
        ([], 401),
        ([""], 401),
        ([SECRET], 401),
        (["Bearer "], 401),
        ([f"Bearer {SECRET}x"], 401),
        ([f"Bearer {SECRET[:-1]}"], 401),
        ([f"Basic {SECRET}"], 401),
        (["Bearer ä"], 401),
        ([f"Bearer {SECRET}", "Bearer wrong"], 401),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_token_opens_every_route_and_nothing_else_does(given, expected, method, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    assert status(OWN, CONTENT, *(("Authorization", value) for value in given), method=method) == expected


def test_a_websocket_is_closed_before_it_is_accepted():
    assert asked([OWN, ("Origin", "http://evil.example")], kind="websocket")[0]["type"] == "websocket.close"
    assert asked([OWN], kind="websocket")[0]["type"] == "behind"


def test_what_is_no_request_goes_through():
    assert asked([], kind="lifespan")[0]["type"] == "behind"


def test_over_http_a_page_is_refused_and_the_client_is_not(fakes, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    fake = fakes()
    fake.guarded()
    fake.answers |= {"update_weights": {"done": True}, "weight_info": {"weight_version": "run-1"}, "resume": {}}
    client = ServerClient(fake.url, token=SECRET)
    assert client.post("update_weights", {"update_info": {}}) == {"done": True}
    assert client.post("resume") == {}
    assert client.weight_version() == "run-1"
    done = list(fake.asked)
    page = {"Origin": "http://evil.example", "Host": "evil.example", "Content-Type": "text/plain"}
    bearer = {"Authorization": f"Bearer {SECRET}"}
    for headers, expected in [
        (page, 403),
        ({**page, **bearer}, 403),
        ({**page, **bearer, "Host": "localhost"}, 403),
        (JSON, 401),
        ({"Content-Type": "text/plain", **bearer}, 415),
    ]:
        answer = requests.post(f"{fake.url}/update_weights", data=b"{}", headers=headers, timeout=30)
        assert answer.status_code == expected
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert fake.asked == done  # nothing of it came through


@pytest.mark.parametrize("token", ["", "another-token-than-this"])
def test_a_trainer_without_the_token_is_one_clear_error_before_training(token, fakes, settings, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    fake = fakes()
    proper(fake, settings)
    fake.guarded()
    with pytest.raises(
        ConfigError, match=f"{fake.url} refuses the trainer: 401 .*set {TOKEN} to the same value"
    ) as error:
        check_server(ServerClient(fake.url, token=token), settings, CPU)
    assert SECRET not in str(error.value)
    assert check_server(ServerClient(fake.url, token=SECRET), settings, CPU).workers == 1


def test_a_trainer_that_uses_another_name_hears_what_to_do(fakes, settings, monkeypatch):
    fake = fakes()
    fake.guarded(address="10.1.2.3")
    monkeypatch.setattr(socket, "getaddrinfo", _all_names_are_local(socket.getaddrinfo))
    client = ServerClient(fake.url.replace("127.0.0.1", "rollouts"))
    with pytest.raises(ConfigError, match="refuses the trainer: 403 .*'rollouts:.*start it with --names and that name"):
        check_server(client, settings, CPU)


def _all_names_are_local(getaddrinfo):
    return lambda host, *rest, **more: getaddrinfo("127.0.0.1", *rest, **more)


def test_ranks_take_the_token_of_the_first(fakes, settings, monkeypatch):
    """A rank on another machine has none in its environment."""
    monkeypatch.setenv(TOKEN, SECRET)
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


def test_a_server_that_sends_elsewhere_is_not_followed(fakes):
    fake, other = fakes(), fakes()
    fake.answers["weight_info"] = (307, {"detail": "elsewhere"}, {"Location": f"{other.url}/weight_info"})
    other.answers["weight_info"] = {"weight_version": "stolen"}
    with pytest.raises(ServerError, match="307"):
        ServerClient(fake.url, token=SECRET).weight_version()
    assert not other.asked


@pytest.mark.parametrize(
    "token", ["short", "x" * 15, "ä" * 20, "with a space " * 2, "with\ttab" * 3, "line\nbreak" * 3]
)
def test_tokens_that_cannot_be_are_refused_without_being_shown(token, monkeypatch):
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ConfigError, match="at least 16 printable ASCII characters") as error:
        server_token()
    assert token not in str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "rollouts", "localhost.example"])
def test_other_machines_are_answered_only_with_a_token_unless_said_so(host, monkeypatch):
    argv = ["builtin:arithmetic", "--host", host]
    with pytest.raises(ConfigError, match=f"--host {host}: .*export {TOKEN}=.*or give --without-token"):
        serve.build(argv, on_cpu=True)
    _, environment = serve.build([*argv, "--without-token"], on_cpu=True)
    assert environment[TOKEN] == ""
    monkeypatch.setenv(TOKEN, SECRET)
    command, environment = serve.build([*argv, "--names", "a", "b"], on_cpu=True)
    assert environment[TOKEN] == environment["VLLM_API_KEY"] == SECRET
    assert environment[NAMES].split(",")[:3] == ["a", "b", host]
    assert not [part for part in command if SECRET in part]
    _, environment = serve.build([*argv, "--without-token"], on_cpu=True)
    assert environment[TOKEN] == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_on_the_loopback_device_a_token_may_be_left_out_and_the_guard_may_not(host):
    command, environment = serve.build(["builtin:arithmetic", "--host", host], on_cpu=True)
    assert command[command.index("--middleware") + 1] == f"{Guard.__module__}.{Guard.__qualname__}"
    assert environment[TOKEN] == environment[NAMES] == ""
    assert "VLLM_API_KEY" not in environment


@pytest.mark.parametrize("option", ["--api-key", "--api_key=abc", "--grpc"])
def test_options_around_the_guard_are_refused(option):
    with pytest.raises(ConfigError, match=f"^{option}: "):
        serve.build(["builtin:arithmetic", option], on_cpu=True)


def test_the_token_is_not_printed(monkeypatch, capsys):
    monkeypatch.setenv(TOKEN, SECRET)
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
