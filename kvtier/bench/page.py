"""One HTML file with a bench's pictures and text, which needs nothing but itself: no script, no
style sheet, no font and no picture is fetched. Pure functions.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["html_page"]

_PAGE: Final = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; }}
pre {{ overflow-x: auto; font-size: 0.8rem; }}
</style></head><body>
<h1>{title}</h1>
<p><strong>{sentence}</strong></p>
{svg}
<pre>{text}</pre>
<details><summary>the result as JSON</summary><pre>{document}</pre></details>
</body></html>
"""
#: What HTML does not want of an SVG file: its prologue, names of name spaces, notes on its maker.
_METADATA: Final = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACES: Final = re.compile(r'\sxmlns(?::\w+)?="[^"]*"')


def html_page(svg: str, document: dict[str, Any], lines: Sequence[str]) -> str:
    """`svg`: a whole SVG file; the last of `lines` is the answer in a sentence."""
    trace = document["trace"]
    picture = _NAMESPACES.sub("", _METADATA.sub("", svg[svg.index("<svg") :]))
    return _PAGE.format(
        title=html.escape(f"Hit ratio of {trace['requests']:,} requests ({trace['format']})"),
        sentence=html.escape(lines[-1] if lines else ""),
        svg=picture,
        text=html.escape("\n".join(lines[:-1])),
        document=html.escape(json.dumps(document)),
    )
