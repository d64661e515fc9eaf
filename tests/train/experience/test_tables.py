"""The configuration takes the names of rules from the tables, and refuses others with a list of them."""

import pytest
from pydantic import ValidationError

from exgrpo.train.config import ExperienceConfig, ObjectiveConfig
from exgrpo.train.experience.buckets import BUCKETS
from exgrpo.train.experience.difficulty import BANDS
from exgrpo.train.experience.sampling import LAWS
from exgrpo.train.experience.selection import RULES
from exgrpo.train.experience.tables import look_up

TABLES = [
    (ExperienceConfig, "question_weight", LAWS),
    (ExperienceConfig, "trajectory", RULES),
    (ExperienceConfig, "bucket_by", BUCKETS),
    (ObjectiveConfig, "train_on", BANDS),
]


@pytest.mark.parametrize(("section", "field", "table"), TABLES)
def test_every_entry_is_a_choice_and_nothing_else(section, field, table):
    for name in table:
        assert getattr(section(**{field: name}), field) == name
    with pytest.raises(ValidationError) as refused:
        section(**{field: "none of them"})
    assert all(f"'{name}'" in str(refused.value) for name in table)


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    assert look_up({"a": 1, "b": 2}, "b", "letter") == 2
    with pytest.raises(ValueError, match="unknown letter 'c'; expected one of a, b"):
        look_up({"a": 1, "b": 2}, "c", "letter")
