"""The configuration takes names from tables and modules, and refuses others with a list of those that are there."""

import inspect
from importlib import import_module
from typing import get_args

import pytest
from pydantic import ValidationError

from exgrpo.train.config.options import ExperienceConfig, ObjectiveConfig
from exgrpo.train.config.replay import LIMITS, PACKAGE
from exgrpo.train.replay import rules
from exgrpo.train.replay.candidates import RULES
from exgrpo.train.replay.difficulty import BANDS


@pytest.mark.parametrize(
    ("section", "field", "table"), [(ExperienceConfig, "trajectory", RULES), (ObjectiveConfig, "train_on", BANDS)]
)
def test_every_entry_is_a_choice_and_nothing_else(section, field, table):
    assert set(get_args(section.model_fields[field].annotation)) == set(table)
    with pytest.raises(ValidationError) as refused:
        section(**{field: "none of them"})
    assert all(f"'{name}'" in str(refused.value) for name in table)


@pytest.mark.parametrize("kind", get_args(rules.Kind))
def test_every_function_of_a_module_is_a_choice_and_nothing_else(kind):
    section = ObjectiveConfig if kind == "weigh" else ExperienceConfig
    module = import_module(f"{PACKAGE}.{kind}")
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    known = sorted(name for name in own if not name.startswith("_"))
    assert rules.names(kind) == known
    limits = dict.fromkeys(LIMITS.values(), 5) if kind == "expire" else {}

    def valued(name):
        return (name,) if kind == "expire" else name

    for name in known:
        assert getattr(section(**{kind: valued(name)}, **limits), kind) == valued(name)
        assert inspect.unwrap(rules.find(kind, name)) is getattr(module, name)
    with pytest.raises(ValidationError) as refused:
        section(**{kind: valued("none of them")})
    assert all(name in str(refused.value) for name in known)


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_a_limit_implies_its_function_which_needs_it(name, limit):
    assert ExperienceConfig(**{limit: 3}).forgets == ("retirement", name)
    assert ExperienceConfig(**{limit: 3}, expire=()).forgets == (name,)
    assert ExperienceConfig(**{limit: 3}, expire=(name, "retirement")).forgets == (name, "retirement")
    with pytest.raises(ValidationError, match=f"experience.expire {name} needs its limit, experience.{limit}"):
        ExperienceConfig(expire=(name,))
