"""How Sphinx builds the documentation site: `python -m sphinx -W docs build/site`."""

import os
import pathlib
import re
import sys

import jax_ring

ROOT = pathlib.Path(__file__).parents[1]

project = "jax_ring"
copyright = author = "the authors of jax_ring"
version = release = jax_ring.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["draw.sh", "outputs"]
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
if base := os.environ.get("SITE_URL"):  # where the site will be, which previews of links need
    html_baseurl = base
    myst_html_meta |= {"property=og:image": f"{base}/_static/card.png", "name=twitter:card": "summary_large_image"}
if os.environ.get("SITE_INTERSPHINX"):  # needs a network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "jax": ("https://docs.jax.dev/en/latest", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
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


def write_gallery(app):
    """A page for each example: what it is, what it printed (see record.py), and its source."""
    sys.path.insert(0, str(ROOT / "docs"))
    import record

    gallery = ROOT / "docs/gallery"
    gallery.mkdir(exist_ok=True)
    for name, command in record.COMMANDS.items():
        source = ROOT / f"examples/{name}.py"
        summary, _, rest = re.match(r'"""(.*?)"""', source.read_text(), re.DOTALL)[1].partition("\n")
        text = re.sub(r"\n\n(?:    .*\n)+", "\n", "\n" + rest).strip()  # without its command
        output = f"It prints, but for progress:\n\n```{{literalinclude}} ../outputs/{name}.txt\n:language: text\n```"
        page = [
            f"# {name}.py", summary, text, f"```sh\n.venv/bin/python {command}\n```",
            output if record.file_of(name).exists() else "", "Its source:",
            f"```{{literalinclude}} ../../examples/{name}.py\n:language: python\n```",
        ]  # fmt: skip
        content = "\n\n".join(filter(None, page)) + "\n"
        file = gallery / f"{name}.md"
        if not file.exists() or file.read_text() != content:
            file.write_text(content)


def link_gallery(app, page, content):
    """On the site, the list of examples leads to their pages instead of their files."""
    if page == "examples":
        content[0] = re.sub(r"\]\(\.\./examples/(\w+)\.py\)", r"](gallery/\1.md)", content[0])


def setup(app):
    app.connect("builder-inited", write_gallery)
    app.connect("source-read", link_gallery)
    app.connect("autodoc-process-docstring", mark_examples, priority=400)  # before napoleon's
    app.connect("autodoc-process-docstring", link_pages)
