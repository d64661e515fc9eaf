"""The program that writes reports."""

import subprocess
import sys
from pathlib import Path

from exgrpo.tools.report import main
from tests.tools.report.pages import SHORT, make_run


def test_the_command(tmp_path, capsys, monkeypatch):
    runs = [make_run(tmp_path / name, SHORT, seed=i) for i, name in enumerate("ab")]
    monkeypatch.chdir(tmp_path)

    assert main([str(runs[0])]) == 0
    assert main([*map(str, runs), "--output", "deep/both.html"]) == 0
    assert main([*map(str, runs)]) == 0
    assert all(Path(page).is_file() for page in ("a/report.html", "deep/both.html", "report.html"))
    assert "a/report.html" in capsys.readouterr().out

    for arguments, message in (
        (["missing"], str(tmp_path / "missing")),
        (["x", "--otput", "x.html"], "unknown option --otput; did you mean --output?"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error


def test_the_module_runs_without_the_training_stack(tmp_path):
    run = make_run(tmp_path / "one", SHORT)
    script = (
        "import sys; from exgrpo.tools.report import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script, str(run)], check=True, timeout=60)
