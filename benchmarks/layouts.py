"""How far the masked layout's numbers are from the compact one's, recipe by recipe.

    python -m benchmarks.layouts

One layer, one token list, dispatcher ``standard``, both layouts. bf16 gives the same bits. A
quantised recipe rounds its activation elsewhere: with a clamp slabs are quantised from fp32,
without one silu is stored once more. Prints one line a case; the last line is JSON.
"""

import json
import time

import torch
from torch import Tensor

from actors.driver import run_scenario
from actors.resolve import resolve
from moe.formats import Stage
from reports.verdict.format_views import view_of
from reports.verdict.subject import Subject
from scenarios.loader import load_scenario

FILE = "scenarios/dispatch/standard_masked.yaml"
CASES = {
    f"{recipe}, {'clamp' if limit == '10.0' else 'no clamp'}": (recipe, limit)
    for recipe in ("bf16", "fp8_block128")
    for limit in ("10.0", "null")
}


def values(layout: str, recipe: str, limit: str) -> dict[str, Tensor]:
    """float64 values of one layout's run, routes in the order of rank, token and slot."""
    loaded = load_scenario(
        FILE,
        overrides=[
            "run.runtime=loopback",
            "inputs.modes=[random]",
            f"moe.layout={layout}",
            f"moe.recipe={recipe}",
            f"model.overrides.swiglu_limit={limit}",
        ],
    )
    outcome = run_scenario(loaded)
    assert outcome.result.verdict == "agree", outcome.result.summary
    (run,) = outcome.runs
    layer = resolve(loaded).judged
    subject = Subject(layer, view_of(layer), run.batch, [r.trace for r in run.reports])
    rows = subject.route_rows
    key = (rows.rank * (len(run.batch.hidden_states) + 1) + rows.token) * layer.top_k + rows.slot
    order = torch.argsort(key)
    return {
        "activation": subject.route_values(Stage.ACTIVATION, "hidden_states")[order],
        "expert output": subject.route_values(Stage.GEMM2, "output")[order],
        "output": run.judgement.output.to(torch.float64),
    }


def main() -> None:
    """Run every case and print."""
    facts = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "scenario": FILE}
    rows = {}
    for name, (recipe, limit) in CASES.items():
        masked, compact = (values(layout, recipe, limit) for layout in ("masked", "compact"))
        rows[name] = {
            what: {
                "differing_share": round(float((masked[what] != compact[what]).double().mean()), 6),
                "relative_distance": float(
                    (masked[what] - compact[what]).norm() / compact[what].norm()
                ),
            }
            for what in masked
        }
        print(f"{name:24} {rows[name]}", flush=True)
    print(json.dumps({**facts, "cases": rows}))


if __name__ == "__main__":
    main()
