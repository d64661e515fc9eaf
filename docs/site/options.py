"""The reference of the configuration, generated from its models: each option with its values, default and meaning."""

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from exgrpo.train.config.options import Config

Schema = dict[str, Any]
"""A JSON schema, or a part of one."""

TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "`True` or `False`", "null": "`None`"}
BOUNDS = {
    "minimum": "from {:,}",
    "exclusiveMinimum": "above {:,}",
    "maximum": "to {:,}",
    "exclusiveMaximum": "below {:,}",
}


def reference() -> str:
    """All options in Markdown: a heading for each section, and Sphinx's directive `confval` for each option."""
    schema = Config.model_json_schema()
    parts = []
    for title, section in sections(schema, schema["$defs"]):
        parts.append(f"## {title or 'The run'}\n\n{section['description']}")
        for name, option in section["properties"].items():
            if "$ref" not in option:
                parts.append(entry(f"{title}.{name}".lstrip("."), option, name in section.get("required", ())))
    return "\n\n".join(parts) + "\n"


def sections(schema: Schema, definitions: dict[str, Schema], title: str = "") -> Iterator[tuple[str, Schema]]:
    """A model and the models within it, in the order of the configuration, each with the key that leads to it.

    A model in a list has a key with `[]`, and one in a mapping a key with `NAME`.
    """
    yield title, schema
    for name, option in schema["properties"].items():
        ways = [("", option), ("[]", option.get("items", {}))]
        ways += [(".NAME", value) for value in option.get("patternProperties", {}).values()]
        for suffix, inner in ways:
            if "$ref" in inner:
                model = definitions[inner["$ref"].rpartition("/")[2]]
                yield from sections(model, definitions, f"{title}.{name}{suffix}".lstrip("."))


def entry(key: str, option: Schema, required: bool) -> str:
    """An option as the directive `confval`, which makes it a target of links and of the search."""
    default = (
        "none, it must be named" if required else f"`{shown(option['default'])}`" if "default" in option else "empty"
    )
    return f"```{{confval}} {key}\n:type: {values(option)}\n:default: {default}\n\n{option['description']}\n```"


def values(option: Schema) -> str:
    """The values that an option takes, in words."""
    if "anyOf" in option:
        return " or ".join(map(values, option["anyOf"]))
    if "$ref" in option:
        return "settings, which a section below lists"
    if "enum" in option:
        return "one of " + ", ".join(f"`{shown(value)}`" for value in option["enum"])
    if "prefixItems" in option:
        return " and ".join(map(values, option["prefixItems"]))
    if option["type"] == "array":
        return f"list of: {values(option['items'])}"
    if option["type"] == "object":
        inner = option.get("additionalProperties") or next(iter(option.get("patternProperties", {}).values()), None)
        return "mapping of names to: " + (values(inner) if isinstance(inner, dict) else "values")
    bounds = [text.format(option[name]) for name, text in BOUNDS.items() if name in option]
    return " ".join([TYPES[option["type"]], *bounds])


def shown(default: Any) -> str:
    """A value as a command line or a recipe has it; text with blanks, and empty text, in quotes."""
    if isinstance(default, str):
        return default if default and not set(default) & set(" \n") else repr(default)
    return str(default)


class Options(SphinxDirective):
    """The directive `options`: the reference in its place."""

    def run(self) -> list[nodes.Node]:
        """The reference as nodes."""
        return self.parse_text_to_nodes(reference(), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("options", Options)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
