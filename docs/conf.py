"""How Sphinx builds the documentation site: `python -m sphinx -W docs build/site`."""

import re

import jax_ring

project = "jax_ring"
copyright = author = "the authors of jax_ring"
version = release = jax_ring.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["draw.sh"]
html_theme = "furo"
html_title = "jax_ring"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
# Furo's default for dark pages underlines the names of imported modules, like links.
pygments_dark_style = "github-dark"
# For search engines and previews of links, on each page that has no description of its own.
myst_html_meta = {
    "description": "Collectives for JAX as XLA custom calls: the same bits on any number of devices, errors that name "
    "the missing rank, faster than lax.psum on CPU devices.",
    "property=og:title": "jax_ring",
    "property=og:description": "Collectives for JAX: the same bits on any number of devices.",
}
html_copy_source = False
smartquotes = False  # so that "tree" can be copied into a program

myst_heading_anchors = 4
# A page with code cells is run when the site is built, and a cell that fails, fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

# Docstrings have Google's sections, and single backticks for code.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
add_module_names = False


def link_pages(app, what, name, obj, options, lines):
    """Docstrings name pages as files of the repository: docs/sharp_bits.md becomes a link."""
    lines[:] = [re.sub(r"docs/(\w+)\.md(#[\w-]+)?", r":doc:`/\1`", line) for line in lines]


def mark_examples(app, what, name, obj, options, lines):
    """Indented lines below a paragraph of a docstring are code."""
    marked, last = [], ""
    for line in lines:
        if line.startswith("    ") and last[:1].strip() and not marked[-1].strip():
            marked += [".. code-block:: python", ""]
        marked.append(line)
        last = line if line.strip() else last
    lines[:] = marked


def setup(app):
    app.connect("autodoc-process-docstring", mark_examples, priority=400)  # before napoleon's
    app.connect("autodoc-process-docstring", link_pages)
