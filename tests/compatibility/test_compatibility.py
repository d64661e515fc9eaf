"""The page and the record of the versions that were tried are those of what is promised."""

import re
from dataclasses import replace

from tests.compatibility.promises import CORE, PACKAGES, ROOT, project
from tests.compatibility.record import BY_HAND, PAGE, newest, problems, read, table, with_table


def test_the_page_and_the_record_are_those_of_what_is_promised():
    page = PAGE.read_text()
    assert page == with_table(page, table(newest())), "python -m tests.compatibility --table"
    assert not problems(read(newest()), project())
    for test in (*CORE, *(test for package in PACKAGES for test in package.tests)):
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text


def test_what_works_by_hand_has_a_record_of_that_day_and_what_does_not_work_is_not_classified():
    entries, metadata = read(newest()), project()
    by_hand = [entry for entry in entries if entry.package in BY_HAND and entry.works]
    for entry in by_hand:
        (link,) = re.findall(r"\]\(\.\./(benchmarks/results/[^)]+)\)", entry.seen)
        assert (ROOT / link).is_file()
        assert entry.date in link
    assert by_hand
    assert all(entry.date or entry.not_tried for entry in entries)
    for lost, word in (("python", "classifier of Python 3.13"), ("GPU", "classifier of NVIDIA")):
        known = [replace(one, predicted="by reading") if one.package == lost else one for one in entries]
        assert word in "".join(problems(known, metadata))
