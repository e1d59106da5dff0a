"""How Sphinx builds the documentation: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import placement  # noqa: E402

project = "torch-placement"
version = release = placement.__version__
copyright = "the torch-placement authors. Licence: Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["generated", "examples"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
highlight_language = "python"

html_theme = "furo"
html_title = f"torch-placement {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["pictures.css"]


def _write_what_the_code_says(app: Sphinx) -> None:
    import from_code

    from_code.write(HERE / "generated")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _write_what_the_code_says)
