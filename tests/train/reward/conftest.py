import pytest


@pytest.fixture(scope="module")
def mine(request, tmp_path_factory):
    """A file with the rewards of the module's tests."""
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(request.module.REWARDS)
    return path


def grade(grader, reward, answers):
    """The grades of answers to the question "q", (response, gold) or with columns, by one of the grader's rewards."""
    grading = grader.begin()
    for response, gold, *columns in answers:
        grading.add(response, gold, "q", reward, *columns)
    return grading.finish()
