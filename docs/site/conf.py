"""The documentation site: Sphinx with MyST and furo over the pages of the repository, where they stand.

MyST reads Markdown as CommonMark, as the page of a repository does. The docstrings are in Sphinx's language. The search
works from a folder of files. The root of the sources is the repository, so that links between pages hold as they are.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from exgrpo import __version__ as release  # noqa: E402

project, author = "exgrpo", "the authors of exgrpo"
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "options", "formulas"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "recipes/**.md",
    "studies/results/*.md",
    "benchmarks/results/*.md",
]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
highlight_language = "text"
default_role = "code"

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Shape", "Source"]
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"exgrpo {release}"
html_static_path = ["style"]
html_css_files = ["site.css"]
html_extra_path = ["start"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
