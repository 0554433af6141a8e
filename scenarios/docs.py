"""The reference page docs/scenarios.md, written from the schema and the rule tables.

``python -m scenarios.docs > docs/scenarios.md`` renews it.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from moe.formats import GatedActivation, QuantRecipe
from scenarios.models import CONFIG_NAMES
from scenarios.presets import PRESET_SOURCES, PRESETS, Preset
from scenarios.rules import MODEL_RULES, SCENARIO_RULES, Rule, RuleKind
from scenarios.schema import Expectation, Scenario, Spec

_INTRO: Final = """\
# Scenario reference

A scenario is one YAML file: a model's MoE layer, a topology, the choices inside the layer, and the
verdict that is expected. Every key is below; a key without a default is required. Unknown keys,
wrong types and impossible combinations are all reported at once, with line and nearest match.
`--set key=value` goes through the same checks. Relative paths start at the scenario file's folder.

This page is generated: `python -m scenarios.docs > docs/scenarios.md`.
"""

_PRESETS_ARE: Final = """\
Sizes are the published ones. The recipe is the one that reads the routed experts of the published
checkpoint; a drawn layer takes any. `kimi_k3` is a latent MoE, whose experts work in
`routed_expert_hidden_size`, the hidden size below: small scenarios override it, too.
A preset says what the layer computes; its glue is DeepSeek V4's whichever preset is named,
`qwen3_moe` too: SGLang 0.5.21, `models/deepseek_v4.py::_run_moe_ffn_dp_sync`."""

_MODEL_KEYS_ARE: Final = """\
What is read of a config.json, and what `model.overrides` may name: the table `CONFIG_NAMES` of
`scenarios/models.py`. Of several keys that are present the first one counts. An override has the
name on the left, or by the one that the model's config.json uses."""

_KINDS: Final = {
    RuleKind.SEMANTIC: "The combination means nothing; always refused.",
    RuleKind.POLICY: (
        "An SGLang server refuses it, though it has a meaning; "
        "`allow_unsupported: true` runs it and notes it in the result."
    ),
    RuleKind.KERNEL_SHAPE: (
        "A real kernel refuses the size; enforced with `moe.strict_shapes: true` and, unless "
        "`allow_unsupported: true` waives it, with backends `deep_gemm` or `deep_ep`; noted in the "
        "result otherwise."
    ),
}

_PUBLISHED_AS: Final = {
    Preset.DEEPSEEK_V4: QuantRecipe.MXFP4_W4A8,
    Preset.DEEPSEEK_V3: QuantRecipe.FP8_BLOCK128,
    Preset.QWEN3_MOE: QuantRecipe.BF16,
    Preset.GLM4_MOE: QuantRecipe.BF16,
    Preset.MINIMAX_M2: QuantRecipe.FP8_BLOCK128,
    Preset.MIXTRAL: QuantRecipe.BF16,
    Preset.KIMI_K2: QuantRecipe.FP8_BLOCK128,
    Preset.GPT_OSS: QuantRecipe.MXFP4_W4A8,
    Preset.KIMI_K3: QuantRecipe.MXFP4_W4A8,
}
"""The recipe that reads the routed experts of the checkpoint named as the preset's source."""

_TYPE_NAMES: Final[dict[type, str]] = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
}


def scenario_page() -> str:
    """The whole page as Markdown."""
    blocks = [_INTRO, *_section_blocks(), *_rule_blocks(), _preset_block(), _model_key_block()]
    return "\n".join(blocks) + "\n"


def _section_blocks() -> Iterator[str]:
    for path, section in _sections("", Scenario):
        summary = str(section.__doc__).partition("\n")[0]
        rows = [_key_row(name, field) for name, field in section.model_fields.items()]
        title = f"`{path}`" if path else "Top level"
        table = _table(("key", "values", "default", "meaning"), rows)
        yield f"## {title}\n\n{summary}\n\n{table}\n"


def _sections(path: str, section: type[Spec]) -> Iterator[tuple[str, type[Spec]]]:
    yield path, section
    for name, field in section.model_fields.items():
        nested: Any = field.annotation
        if _is_section(nested):
            yield from _sections(f"{path}.{name}".removeprefix("."), nested)


def _is_section(annotation: Any) -> bool:  # noqa: ANN401  # annotations have no common type
    return isinstance(annotation, type) and issubclass(annotation, Spec)


def _key_row(name: str, field: FieldInfo) -> tuple[str, ...]:
    meaning = str(field.description).replace("\n", " ")
    return f"`{name}`", _values(field.annotation), _default(field), meaning


def _values(annotation: Any) -> str:  # noqa: ANN401  # annotations have no common type
    """What a key takes, from its type: a literal's members, a union's, or a type's name."""
    container, members = get_origin(annotation), get_args(annotation)
    if container is Annotated:
        return _values(members[0])
    if container is tuple:
        return f"list of {_values(members[0])}"
    if members and container is not dict:
        return ", ".join(_literal(m) if container is Literal else _values(m) for m in members)
    if _is_section(annotation):
        return "section, or a bare verdict" if annotation is Expectation else "section"
    is_enum = isinstance(annotation, type) and issubclass(annotation, StrEnum)
    return ", ".join(annotation) if is_enum else _TYPE_NAMES.get(annotation, "keys with values")


def _literal(member: bool | str) -> str:
    return str(member).lower() if isinstance(member, bool) else member


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Expectation):
        return f"`{default.verdict}`"
    if isinstance(default, Spec):
        return "each key's"
    return f"`{default if default and isinstance(default, str) else json.dumps(default)}`"


def _rule_blocks() -> Iterator[str]:
    yield "# Rules\n"
    rows: list[Rule[Any]] = [*SCENARIO_RULES, *MODEL_RULES]
    for kind, meaning in _KINDS.items():
        table = _table(
            ("rule", "key", "source"),
            [
                (f"`{rule.name}`", f"`{rule.field}`", rule.source)
                for rule in rows
                if rule.kind == kind
            ],
        )
        yield f"## {kind.replace('_', ' ').capitalize()}\n\n{meaning}\n\n{table}\n"


def _preset_block() -> str:
    rows = [
        (
            f"`{preset}`",
            str(model.hidden_size),
            str(model.moe_intermediate_size),
            f"{model.num_experts_per_tok} of {model.n_routed_experts}",
            str(model.n_shared_experts),
            f"{model.scoring_func}{' + bias' if model.correction_bias else ''}",
            str(model.routed_scaling_factor),
            _activation(model.activation),
            f"`{_PUBLISHED_AS[preset]}`",
            PRESET_SOURCES[preset],
        )
        for preset, model in PRESETS.items()
    ]
    head = (
        *("preset", "hidden", "expert", "experts", "shared", "scores", "scale"),
        *("activation", "experts published as", "source"),
    )
    return f"# Presets\n\n{_PRESETS_ARE}\n\n{_table(head, rows)}\n"


def _model_key_block() -> str:
    rows = [
        (f"`{field}`", ", ".join(f"`{name}`" for name in names))
        for field, names in CONFIG_NAMES.items()
    ]
    return f"# Model keys\n\n{_MODEL_KEYS_ARE}\n\n{_table(('read as', 'keys'), rows)}"


def _activation(rule: GatedActivation) -> str:
    """Its kind, and those of its constants that it has."""
    constants = (("limit", rule.limit), ("alpha", rule.alpha), ("linear", rule.linear_limit))
    given = (f"{name} {value:g}" for name, value in constants if value is not None)
    return ", ".join((rule.kind, *given))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(scenario_page())
