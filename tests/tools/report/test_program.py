"""The program that writes reports; a report that follows its runs: what it answers, and to whom."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from exgrpo.tools.report import FollowedRuns, main, open_server
from tests.tools.report.pages import SHORT, make_run, training_record


def test_the_command(tmp_path, capsys, monkeypatch):
    runs = [make_run(tmp_path / name, SHORT, seed=i) for i, name in enumerate("ab")]
    monkeypatch.chdir(tmp_path)

    assert main([str(runs[0])]) == 0
    assert main([*map(str, runs), "--output", "deep/both.html"]) == 0
    assert main([*map(str, runs)]) == 0
    assert all(Path(page).is_file() for page in ("a/report.html", "deep/both.html", "report.html"))
    assert "a/report.html" in capsys.readouterr().out

    assert main(["missing"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert str(tmp_path / "missing") in error


def test_the_module_runs_without_the_training_stack_and_its_page_follows_nothing(tmp_path):
    run = make_run(tmp_path / "one", SHORT)
    script = (
        "import sys; from exgrpo.tools.report import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script, str(run)], check=True, timeout=60)
    page = (run / "report.html").read_text()
    assert "connect-src" not in re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "data-version" not in page


@pytest.fixture
def served(tmp_path):
    server = open_server([make_run(tmp_path / "one", SHORT)], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def asked(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def shown(followed):
    """The text of the page without its scripts and style."""
    return re.sub(r"<(script|style)[^>]*>.*?</\1>", "", followed.page(), flags=re.DOTALL)


def test_the_page_is_of_the_version_that_it_names(served):
    answer, page = asked(served, "/")
    assert answer.status == 200
    version = asked(served, "/version")[1]
    assert f'<main data-version="{version}">' in page
    assert "connect-src 'self'" in page
    assert answer.getheader("Content-Security-Policy") == "frame-ancestors 'none'"
    assert asked(served, "/metrics.jsonl")[0].status == 404
    assert asked(served, "/", method="POST")[0].status == 501
    assert served.server_address[0] == "127.0.0.1", "of this machine alone"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "localhost:1", "127.0.0.1:{port}."]
)
def test_another_name_of_the_server_is_refused(served, host):
    """A page of somebody else may make its own name point here."""
    for path in ("/", "/version"):
        answer, text = asked(served, path, Host=host.format(port=served.server_port))
        assert answer.status == 403
        assert "one" not in re.findall(r"\w+", text)
    assert asked(served, "/version", Host=f"localhost:{served.server_port}")[0].status == 200


def test_what_is_not_there_yet_or_any_more_is_a_line(tmp_path):
    run, metrics = tmp_path / "one", tmp_path / "one" / "metrics.jsonl"
    followed, versions = FollowedRuns([run]), []
    for change, line in (
        (lambda: None, f"one: there is no folder {run}"),
        (run.mkdir, "one: waiting for the first step"),
        (lambda: metrics.write_text(""), "one: waiting for the first step"),
        (lambda: metrics.write_text(json.dumps(training_record(1)) + "\n"), "Does it learn?"),
        (lambda: metrics.write_text("no record\n"), "holds no readable record; it is damaged"),
        (lambda: (metrics.unlink(), metrics.mkdir()), "metrics.jsonl cannot be read"),
    ):
        change()
        versions.append(followed.version())
        page = shown(followed)
        assert line in page
        assert ("waiting" in page) == ("waiting" in line)
    assert len(set(versions)) == len(versions)
    assert followed.version() == versions[-1]


def test_one_run_that_waits_does_not_hide_another(tmp_path):
    (tmp_path / "new").mkdir()
    page = shown(FollowedRuns([make_run(tmp_path / "old", SHORT), tmp_path / "new"]))
    assert "new: waiting for the first step" in page
    assert "Does it learn?" in page


def test_mistakes_of_options_are_one_line(tmp_path, capsys, served):
    port = str(served.server_port)
    for argv, message in (
        (["x", "--port", "1"], "give --follow with it"),
        (["x", "--follow", "--output", "x.html"], "leave one of the two out"),
        (["x", "--follow", "--port", port], f"--port {port} cannot be used"),
        (["x", "--follow", "--port", "70000"], "port"),
        (["x", "--otput", "x.html"], "unknown option --otput; did you mean --output?"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1


def test_ctrl_c_ends_it_in_one_line(tmp_path):
    command = [sys.executable, "-m", "exgrpo.tools.report", "--follow", str(tmp_path / "one")]
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell starts what is in its background without
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=heeding
    ) as process:
        assert re.match(r"the report is at http://127\.0\.0\.1:\d+/ until Ctrl-C\n", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("the report is not served any more\n", "")
    assert process.returncode == 0
