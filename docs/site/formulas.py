"""Formulas as MathML, which browsers draw themselves: the pages need no script from elsewhere."""

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def write_inline(translator: Any, node: nodes.math) -> None:
    """A formula within a line."""
    _write(translator, node, tex2mathml(node.astext(), as_block=False))


def write_block(translator: Any, node: nodes.math_block) -> None:
    """A formula in lines of its own."""
    _write(translator, node, f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')


def _write(translator: Any, node: nodes.Element, mathml: str) -> None:
    translator.body.append(mathml)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the renderer `mathml` to Sphinx."""
    app.add_html_math_renderer("mathml", inline_renderers=(write_inline, None), block_renderers=(write_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
