"""What is changed in the code as griffe sees it, before the reference is made of it."""

from __future__ import annotations

import re
from typing import Any

from griffe import Attribute, ExprCall, ExprKeyword, Extension, Object

HEADING = re.compile(r"^Example:$", re.MULTILINE)


class Plain(Extension):
    """Shows examples as code, and the defaults of settings as they are."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Have a section "Example:" shown as code: griffe does that for "Examples:" only."""
        if obj.docstring:
            obj.docstring.value = HEADING.sub("Examples:", obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Show `setting(0.1, low=0)` as 0.1, and a setting without a default as required."""
        value = attr.value
        if isinstance(value, ExprCall) and str(value.function) == "setting":
            first = value.arguments[0] if value.arguments else None
            attr.value = None if first is None or isinstance(first, ExprKeyword) else first
