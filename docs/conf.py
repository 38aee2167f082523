"""How `make docs` builds the site: strict, offline, from the pages here, the docstrings and the commands."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

from ermoe import __version__  # noqa: E402

project = "ermoe"
author = "The ermoe contributors"
copyright = author
version = release = __version__
html_title = f"ermoe {__version__}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "commands",
    "gallery",
    "names",
    "offline",
    "presets",
    "public",
]
exclude_patterns = ["_ext", "_build"]
source_suffix = {".md": "markdown"}
nitpicky = True
smartquotes = False  # options begin with two hyphens
suppress_warnings = ["ref.python"]  # a short type in a signature may fit two classes

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
default_role = "py:obj"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "default"
pygments_dark_style = "monokai"
