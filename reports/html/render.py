"""``result.json`` as one HTML page that opens from disk: no network, no verdict of its own."""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moe.formats import Stage
from reports.html import facts, wording
from reports.html.stage_map import SYMBOLS, stage_maps
from reports.html.topology import draw_topology
from reports.html.world import count
from reports.result import Result

ROWS_SHOWN: Final = 50
"""Findings and collectives on the page; the rest is counted and stands in ``result.json``."""
LONG_TEXT: Final = 60_000
"""Characters of the resolved scenario that a page carries."""

COPY_SCRIPT: Final = """
for (const block of document.querySelectorAll("pre.copyable")) {
  if (!navigator.clipboard) break;
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
  });
  block.after(button);
}
"""
"""The page's only script; the content security policy names it by its hash."""


def render(result: Result) -> str:
    """One self-contained page; every text of the result is escaped and cannot reorder the page.

    Args:
        result: shown as it is, whatever its verdict; empty parts are left out.

    Returns:
        HTML under 300 kB for 8 ranks and under 2 MB for 256.
    """
    page = _environment().get_template("page.html.j2")
    return page.render(
        result=result,
        stages=list(Stage),
        first=result.first_divergence,
        rounds=count(result.scenario, "run", "rounds"),
        explanation=facts.explanation(result),
        closest=facts.closest_call(result),
        blindest=facts.least_sensitive(result),
        lost=facts.lost_ranks(result),
        compared=facts.compared(result),
        drawing=draw_topology(result),
        maps=stage_maps(result.stages),
        traffic=facts.largest_traffic(result, ROWS_SHOWN),
        rows_shown=ROWS_SHOWN,
        scenario=_as_yaml(result.scenario),
        certificate=_as_yaml(result.certificate and result.certificate.model_dump(mode="json")),
        script=COPY_SCRIPT,
        script_hash=_csp_hash(COPY_SCRIPT),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        visible=wording.visible,
        isolated=wording.isolated,
        number=wording.number,
        byte_count=wording.byte_count,
        ranges=wording.ranges,
        plural=wording.plural,
        error_over_band=facts.error_over_band,
    )
    environment.globals["symbols"] = SYMBOLS
    return environment


def _as_yaml(value: object) -> str:
    if not value:
        return ""
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return wording.visible(text, LONG_TEXT)


def _csp_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
