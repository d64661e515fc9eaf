"""The page and the record of the versions that were tried are those of what is promised."""

from tests.compatibility.promises import (
    CORE,
    PACKAGES,
    ROOT,
    project,
)
from tests.compatibility.record import PAGE, newest, problems, read, table, with_table


def test_the_page_and_the_record_are_those_of_what_is_promised():
    page = PAGE.read_text()
    assert page == with_table(page, table(newest())), "python -m tests.compatibility --table"
    assert not problems(read(newest()), project())
    for test in (*CORE, *(test for package in PACKAGES for test in package.tests)):
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text
