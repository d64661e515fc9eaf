"""Pages whose texts want to be more than text: what may run is named by its hash, and no text becomes a part of it."""

import base64
import hashlib
import html
import json
import os
import re

import pytest

from exgrpo.train.metrics.report.figures import as_json, template
from exgrpo.train.metrics.report.page import write_report
from tests.tools.report.pages import SHORT, Page, held_out, make_run

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "</pre></details><iframe src='https://evil.example'></iframe>",
    "<a href='javascript:alert(1)'>x</a>",
    "</title></style><link rel=stylesheet href=//evil.example>",
    "<!-- ", "]]>", "<![CDATA[", "&lt;script&gt;", "{{ 7 * 7 }}{% raw %}", "`${alert(1)}`",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "@import url(//evil.example)",
)  # fmt: skip
INVISIBLE = {chr(code): f"\\x{code:02x}" for code in (0, 0x1B, 0x7F, 0x9B)}
INVISIBLE |= {chr(code): f"\\u{code:04x}" for code in (0x202E, 0x2066, 0x200F, 0xD800, 0xDCFF)}
TEXTS = (*HOSTILE, *(f"right{character}left" for character in INVISIBLE))
SHOWN = (*HOSTILE, *(f"right{name}left" for name in INVISIBLE.values()))


def records(texts):
    """A run of two steps that has measured things of these names."""
    named = {f"{heading}/{text}": 0.5 for text in texts for heading in ("reward", "seconds", "tokens")}
    tested = {f"test/{text}": 0.5 for text in texts} | {f"{text}/pass_rate": 0.5 for text in texts}
    return [held_out(0, 0.25) | tested, {**SHORT[1], **named}, held_out(1, 0.5) | tested]


def report(folder, names, texts):
    """The page about two runs with these names, which have these texts in their options and metrics."""
    options = {"texts": list(texts), **{text: text for text in texts}}
    runs = [make_run(folder / name, records(texts), **options, only=number) for number, name in enumerate(names)]
    write_report(runs, folder / "page.html")
    return Page(folder / "page.html")


def harmless(texts):
    return [f"text {number}" for number in range(len(texts))]


def check(page, plain):
    """Texts made no element and no attribute, and can load nothing and run nothing."""
    assert page.elements <= plain.elements
    assert all(place.startswith("#") for place in page.loads)
    assert not [name for element in page.elements for name in element if name.startswith("on")]
    rules = dict(" ".join(rule.split()).split(" ", 1) for rule in page.policy.split(";"))
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert page.scripts == plain.scripts
    assert rules == {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{found}'" for found in hashes),
        "style-src": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not set(page.source) & set(INVISIBLE)
    for figure in page.figures.values():
        for text in texts_of(figure["figure"]):
            shown = OWN_TAGS.sub("", text)
            assert "<" not in shown  # plotly reads tags, entities, and %{...} where a template is
            assert not set(shown) & set(INVISIBLE)


OWN_TAGS = re.compile(r"</?b>|<br>|<extra></extra>")


def texts_of(value):
    """All texts that plotly gets."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_of(inner)


def test_a_report_shows_hostile_names_as_text(tmp_path):
    names = [text.replace("/", "") for text in (HOSTILE[0], HOSTILE[1])]
    names[0] += "right\u202eleft" + os.fsdecode(b"\xff")
    page, plain = report(tmp_path / "hostile", names, TEXTS), report(tmp_path / "plain", ("a", "b"), harmless(TEXTS))
    check(page, plain)
    assert names[1] in page.texts
    assert any(html.escape(names[1], quote=False) in name for name in page.traces("Held-out Pass@1 against steps"))
    assert r"right\u202eleft\udcff" in page.texts
    for text in SHOWN:
        if "/" not in text:  # of a metric, what stands behind it is shown
            assert f"Reward in training: {text}" in page.texts
        assert f"Held-out set {text}" in page.texts


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
    (tmp_path / "page.html").write_text('{% extends "layout.html" %}')
    assert "script" not in template(tmp_path / "page.html").render(title="t")


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
