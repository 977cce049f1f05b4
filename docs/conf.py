"""Configures the documentation site, made of the Markdown pages and notebooks of this folder.

python -m sphinx -W -b html docs build/site

The pages are the same on the site and in the repository:
- The navigation is that of the tables of index.md.
- Links to files that are no pages lead to the repository.
- Names in code font lead to the reference, and commands to the page of the command line.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "unified_ckpt"
release = _PROJECT["version"]
repository = _PROJECT["urls"]["Source"]

extensions = ["myst_parser", "sphinx_copybutton", "site_pages"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["examples", "site"]
nitpicky = True
myst_heading_anchors = 6
highlight_language = "text"
pygments_dark_style = "github-dark"
smartquotes = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"unified_ckpt {release}"
html_theme_options = {  # a button on each page leads to its file, also to that of a notebook
    "top_of_page_buttons": ["view"],
    "source_repository": repository,
    "source_branch": f"v{release}",
    "source_directory": "docs/",
}
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "site" / "search.js")
templates_path = ["site"]
html_show_copyright = False
html_use_index = False  # no page defines an entry
html_show_sphinx = False
html_copy_source = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
