"""An extension of Griffe: brackets in docstrings are text, not references of Markdown."""

import re
from typing import Any

import griffe


class PlainBrackets(griffe.Extension):
    """Escapes `][`, as in "name[-LAYERS][+option]", outside of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that is documented."""
        if obj.docstring:
            parts = re.split(r"(`[^`]*`)", obj.docstring.value)
            escaped = (p if p.startswith("`") else p.replace("][", "]\\[") for p in parts)
            obj.docstring.value = "".join(escaped)
