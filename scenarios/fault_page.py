"""The reference page docs/faults.md, written from the table of faults.

``python -m scenarios.fault_page > docs/faults.md`` renews it.
"""

import re
import sys
from collections.abc import Iterator
from typing import Final

from moe.faults import NO_FAULT_OF, VOID_WHERE, Fault, FaultClass
from scenarios.listing import faults_of

_INTRO: Final = """\
# Faults

A fault is a named way to be wrong. `--inject` lets it loose on one stage of one rank, so that a
user sees what a verdict looks like, and a test sees that a check can see:

```sh
.venv/bin/python run.py scenarios/smoke/ep2_dp.yaml --runtime loopback --inject tokens_swapped
```

Most stand for a public bug, named by its repository and number. Hardware races are emulated: the
data are spoilt as the race would spoil them. A fault has acted when it has changed a bit; where it
cannot, it is *void*, and the result says that it found nothing to act on.

| parameter | meaning |
|---|---|
| `rank` | `auto`: the second rank with tokens; `idle`: the first without; `all`; or a number |
| `row`, `expert` | which of those there are, modulo their number |
| `op`, `occurrence` | which call of a forward that carries rows: the verb, its number from 0 |
| `stage` | another stage to act at, where the fault knows what is handed on there |
| others | sizes and limits, explained by the fault's row |

This page is generated: `python -m scenarios.fault_page > docs/faults.md`. The same tables:
`python run.py list --faults`.

## How many a scenario sees

```sh
.venv/bin/python run.py score scenarios/smoke/ep2_dp.yaml --jobs 1 --quiet --out runs/score
```

runs every fault, with its default parameters, in every scenario that the paths name, on loopback,
or those that `--faults NAME` names, and says what became of each pair:

| fate | meaning |
|---|---|
| `named` | localised, and the diagnosis there names the fault's kind of mistake |
| `localised` | killed, and the first divergence is at the stage and on a rank of the fault |
| `killed` | the verdict is another than agree; a hang counts |
| `survived` | the verdict is agree, though a bit of a traced tensor has changed |
| `void` | not a bit of a traced tensor has changed |
| `unsupported` | cannot run here: it ends a process, and ranks of loopback share one |

The first three include each other in this order; void and unsupported count neither way. The exit
code is 0 if nothing survived and 1 otherwise, also if a scenario's run without a fault does not
agree or no fault acts in it. `--out DIR` has `score.json` (format `moe-assay-score/1`): for each
scenario its name, a fingerprint of what is computed and judged, and by fault the fate with stage
and rank of what was found first, or why it is void or unsupported. The fingerprint is of the
scenario, the code, and what captured inputs and the checkpoint's layer hold.
`reports.score.would_have_failed` reads from it, for a run of the same fingerprint, with which
faults it would have failed.

[score.yaml](../scenarios/sweeps/score.yaml) has small scenarios for every stage, dispatcher,
layout, recipe and topology; [benchmarks/results/score.json](../benchmarks/results/score.json) is
their score.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *(line for kind in FaultClass for line in _section(kind))]) + "\n"


def _section(kind: FaultClass) -> Iterator[str]:
    yield f"## {kind.value[0].upper()}{kind.value[1:]}\n"
    faults = faults_of(kind)
    if not faults:
        yield f"No fault: {NO_FAULT_OF[kind]}.\n"
        return
    yield "| fault | stage | what goes wrong | void where | origin |"
    yield "|---|---|---|---|---|"
    yield from map(_row, faults)
    yield ""


def _row(fault: Fault) -> str:
    params = "".join(f" `{name}={value}`" for name, value in fault.params.items())
    origin = "; ".join(_linked(part) for part in fault.origin.split("; "))
    cells = (f"`{fault.name}`{params}", fault.stage, fault.about, VOID_WHERE[fault.name], origin)
    return f"| {' | '.join(cells)} |"


def _linked(origin: str) -> str:
    """A repository with a number or a commit as a link, other words as they are."""
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)([#@])(\w+)", origin)
    if found is None:
        return origin
    repository, mark, what = found.groups()
    kind = "issues" if mark == "#" else "commit"
    return f"[{origin}](https://github.com/{repository}/{kind}/{what})"


if __name__ == "__main__":
    sys.stdout.write(page())
