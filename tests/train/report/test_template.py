"""Scripts and data in a page: what may run is named by its hash, and no text can become a part of it."""

import base64
import hashlib
import json
import re

import pytest

from exgrpo.train.report.template import as_json, template


def rendered(folder, scripts, **texts):
    for name, text in texts.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    (folder / "page.html").write_text('{% extends "layout.html" %}{% set scripts = ' + repr(scripts) + " %}")
    return template(folder / "page.html").render(title="t")


def test_each_script_of_a_page_is_allowed_by_its_hash_and_nothing_else_is(tmp_path):
    page = rendered(tmp_path, ["b.js", "a.js", "plotly.min.js"], a="let a = 1 < 2 && 'é';\n\n", b="\nlet b;")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert scripts[:2] == ["\nlet b;", "let a = 1 < 2 && 'é';\n\n"]
    assert "Plotly" in scripts[2]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    rules = {name: values for name, *values in (rule.split() for rule in policy.split(";"))}
    assert rules["script-src"] == [f"'sha256-{found}'" for found in hashes]
    assert rules["default-src"] == ["'none'"]


def test_a_page_without_scripts_allows_none(tmp_path):
    (tmp_path / "page.html").write_text('{% extends "layout.html" %}')
    page = template(tmp_path / "page.html").render(title="t")
    assert "script" not in page


@pytest.mark.parametrize("text", ["let a = '</SCRIPT>';", "// <!-- "])
def test_a_script_that_would_end_its_element_is_a_defect(tmp_path, text):
    with pytest.raises(ValueError, match=r"a\.js"):
        rendered(tmp_path, ["a.js"], a=text)


def test_json_in_a_page_has_no_character_of_markup():
    value = {"</script>": ["<!--", "a & b", "\u202e\u2028é", "\udcff", 0.25, None]}
    text = as_json(value)
    assert not set(text) & set("<>&\u202e\u2028é\udcff")
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="JSON"):
        as_json(float("nan"))
