"""Keep the site whole without a network: formulas are MathML at build time, not a script from elsewhere."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)


def _mathml(node: nodes.Element, *, as_block: bool) -> str:
    try:
        return str(tex2mathml(node.astext(), as_block=as_block))
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return f"<code>{node.astext()}</code>"


def visit_math(self: HTML5Translator, node: nodes.Element) -> None:
    """Write an inline formula."""
    self.body.append(_mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_displaymath(self: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula on a line of its own."""
    self.body.append(self.starttag(node, "div", CLASS="formula", ids=node.get("ids", [])))
    self.body.append(_mathml(node, as_block=True) + "</div>\n")
    raise nodes.SkipNode


def drop_thebe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Leave out sphinx-thebe's scripts: they name a foreign host, and a page here has no kernel to run on."""
    context["script_files"] = [
        script
        for script in context.get("script_files", [])
        if "thebe" not in f"{script} {getattr(script, 'attributes', {}).get('body', '')}"
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displaymath, None))
    app.connect("html-page-context", drop_thebe, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
