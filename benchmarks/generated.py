"""Scenarios drawn by number: any topology, dispatcher, layout, recipe, model, batch and switches.

    python -m benchmarks.generated [--count 200]

A draw is a list of ``--set`` texts on the smallest shipped scenario, so the command line can repeat
it. Most draws break a rule of the schema; those are counted, rule by rule, and drawn again. Prints
what was drawn and what was refused.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final, get_args

from moe.formats import DispatchFormat, Phase, Platform, QuantRecipe
from scenarios.command_line import apply_sets
from scenarios.loader import LoadedScenario, check_document
from scenarios.presets import PRESET_CONFIGS, Preset
from scenarios.schema import BatchSpec, RoutingSpec
from scenarios.sections import MoeSpec, Spec
from scenarios.support import unsupported_reasons
from scenarios.yaml_text import read_file

BASE: Final = Path(__file__).parent.parent / "scenarios" / "smoke" / "ep2_dp.yaml"

SIZES: Final[Mapping[str, Sequence[float]]] = {
    "hidden_size": (128, 256, 384, 512),
    "routed_expert_hidden_size": (128, 256),
    "moe_intermediate_size": (128, 256, 512),
    "intermediate_size": (128, 192, 256, 512),
    "n_routed_experts": (8, 12, 16),
    "num_experts": (8, 12, 16),
    "num_local_experts": (8, 12, 16),
    "num_experts_per_tok": (1, 2, 3, 4, 6, 8),
    "num_experts_per_token": (1, 2, 4, 8),
    "n_shared_experts": (0, 1, 2),
    "num_shared_experts": (0, 1, 2),
    "routed_scaling_factor": (1.0, 2.2, 2.6),
    "n_group": (1, 2, 4),
    "topk_group": (1, 2),
    "swiglu_limit": (1.0, 7.0, 10.0),
    "vocab_size": (1000,),
}
"""Key of a config.json -> values that keep a forward small."""

SWITCHES: Final = (
    "compact_eager",
    "masked_m_cap",
    "mask_dp_pad_moe",
    "dp_use_gatherv",
    "dp_use_reduce_scatter",
    "dp_gather_fp8",
    "shared_expert_tp1",
    "dp_shared_expert_local",
    "deepep_bf16_dispatch",
    "deepep_v2_force_max_len",
    "silu_mul_keep_fp32",
    "deterministic",
)
ROOM: Final = 64
"""Rows that a rank may send, where a dispatcher has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One legal draw.

    sets     texts as of ``--set``, for ``BASE``
    loaded   what they make of it
    refused  rule -> draws that broke it before this one was legal
    """

    sets: tuple[str, ...]
    loaded: LoadedScenario
    refused: Counter[str]


def generated(number: int) -> Generated:
    """The draw of a number: the same at any time, in any order; dispatchers take turns."""
    dispatcher = list(DispatchFormat)[number % len(DispatchFormat)]
    draw = random.Random(f"generated {number}")
    refused: Counter[str] = Counter()
    while True:
        values = {"name": f"generated_{number}", **_values(draw, dispatcher)}
        sets = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
        document = read_file(BASE)
        apply_sets(document, sets)
        checked = check_document(document, BASE)
        if checked.loaded is None:
            rules = [refusal.name for refusal in checked.refusals]
            refused.update(rules[:1] or ["what single keys take"])
        elif unsupported_reasons(checked.loaded.scenario, checked.loaded.model):
            refused.update(["what this version runs"])
        else:
            return Generated(sets=sets, loaded=checked.loaded, refused=refused)


def _values(draw: random.Random, dispatcher: DispatchFormat) -> dict[str, object]:
    """Keys and values of one draw, legal or not."""
    attention, moe = _topology(draw)
    return {
        "model": _model(draw),
        "parallel.world_size": attention["dp"] * attention["tp"] * attention["cp"],
        "parallel.attention": attention,
        "parallel.moe": moe,
        "moe": {"dispatcher": dispatcher, **_moe(draw)},
        "platform": draw.choice(list(Platform)),
        "batch.phase": draw.choice(list(Phase)),
        "batch.tokens": _tokens(draw, attention["dp"]),
        "batch.padding": _mostly_auto(draw, BatchSpec, "padding"),
        "batch.routing.kind": draw.choice(_words(RoutingSpec, "kind")),
        "allow_unsupported": draw.random() < 0.2,
        "run.runtime": "loopback",
        "run.rounds": draw.choice((1, 1, 1, 3)),
    }


def _topology(draw: random.Random) -> tuple[dict[str, int], dict[str, int]]:
    """Degrees of attention and of the experts over the same 1, 2 or 4 ranks."""
    world = draw.choice((1, 2, 2, 4, 4, 4))
    degrees = [n for n in (1, 2, 4) if world % n == 0]
    dp = draw.choice(degrees)
    rest = world // dp
    tp, cp = draw.choice([(rest, 1), (rest, 1), (1, rest)])
    ep = draw.choice(degrees)
    return {"dp": dp, "tp": tp, "cp": cp}, {"ep": ep, "tp": world // ep}


def _model(draw: random.Random) -> dict[str, object]:
    preset = draw.choice(list(Preset))
    sizes = {key: draw.choice(SIZES[key]) for key in PRESET_CONFIGS[preset] if key in SIZES}
    is_hashed = preset is Preset.DEEPSEEK_V4 and draw.random() < 0.2
    return {"preset": preset, "layer": "hash_moe" if is_hashed else "moe", "overrides": sizes}


def _moe(draw: random.Random) -> dict[str, object]:
    switched = {name: True for name in SWITCHES if draw.random() < 0.1}
    return {
        "recipe": draw.choice(list(QuantRecipe)),
        "layout": _mostly_auto(draw, MoeSpec, "layout"),
        "shared_experts": _mostly_auto(draw, MoeSpec, "shared_experts"),
        "reduce": _mostly_auto(draw, MoeSpec, "reduce"),
        "redundant_experts": draw.choice((0, 0, 0, 4)),
        "placement": draw.choice(_words(MoeSpec, "placement")),
        "switches": {**switched, "max_dispatch_tokens_per_rank": ROOM},
    }


def _tokens(draw: random.Random, groups: int) -> list[int]:
    """Tokens of each attention-DP group: uneven with idle ones, equal, or none at all."""
    kind = draw.random()
    if kind < 0.05:
        return [0] * groups
    if kind < 0.25:
        return [draw.randint(1, 12)] * groups
    drawn = [draw.choice((0, 1, draw.randint(2, 9), draw.randint(10, 40))) for _ in range(groups)]
    return drawn if any(drawn) else [*drawn[1:], 7]


def _mostly_auto(draw: random.Random, section: type[Spec], key: str) -> str:
    return "auto" if draw.random() < 0.5 else draw.choice(_words(section, key))


def _words(section: type[Spec], key: str) -> list[str]:
    """The words that a key of the schema takes."""
    return list(get_args(section.model_fields[key].annotation))


def main() -> None:
    """Draw, and print what came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    drawn = [generated(number) for number in range(parser.parse_args().count)]
    refused = sum((one.refused for one in drawn), Counter[str]())
    print(f"{len(drawn)} legal, {sum(refused.values())} refused")
    for rule, count in refused.most_common():
        print(f"  {count:6} {rule}")
    for what in ("moe.dispatcher", "moe.recipe", "platform", "model.preset", "batch.phase"):
        read = attrgetter(what)
        values = Counter(str(read(one.loaded.scenario)) for one in drawn)
        print(f"{what}: {dict(values.most_common())}")


if __name__ == "__main__":
    main()
