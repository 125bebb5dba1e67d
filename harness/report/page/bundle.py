"""Vega, Vega-Lite and vega-embed as one script that needs no network."""

import logging
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

from harness import store

log = logging.getLogger(__name__)
SNIPPET = "window.vegaEmbed = vegaEmbed;"  # all that the page calls


@cache
def vega_bundle() -> str:
    """Bundling takes seconds and depends on versions alone, so it is kept in the user's cache folder."""
    import altair
    import vl_convert

    vega_lite = ".".join(altair.VEGALITE_VERSION.split(".")[:2])
    path = _cache_folder() / f"vega-{version('vl-convert-python')}-{vega_lite}.js"
    if path.exists():
        return path.read_text(encoding="utf-8")
    text: str = vl_convert.javascript_bundle(SNIPPET, vl_version=vega_lite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_atomically(path, text.encode())
    except OSError as error:
        log.warning("%s cannot be written, so each report bundles its charts anew: %s", path, error)
    return text


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attention-harness"
