"""From a scenario's ``model`` section to the sizes and rules of the layer it names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from scenarios.errors import did_you_mean
from scenarios.models import CONFIG_NAMES, ModelError, MoeModel, model_from_config, moe_section
from scenarios.presets import PRESET_CONFIGS
from scenarios.sections import ModelSpec

_FIELD_OF: Final = {key: field for field, keys in CONFIG_NAMES.items() for key in keys}


def resolve_model(spec: ModelSpec, base_dir: Path) -> MoeModel:
    """The model that a scenario names, with its overrides applied.

    Args:
        spec: a preset, or a config.json whose path is relative to ``base_dir``.
        base_dir: the folder of the scenario file.

    Raises:
        ModelError: no such file, no JSON object, no MoE, an unknown or ill-typed override;
            the faults' keys are relative to the ``model`` section.
    """
    faults: list[tuple[str, str]] = []
    try:
        config = _config(spec, base_dir)
        overridden = _apply_overrides(config, spec.overrides, faults)
        model = model_from_config(overridden, name=spec.preset and spec.preset.value)
    except ModelError as error:
        faults += [_in_section(fault, spec) for fault in error.faults]
    if faults:
        raise ModelError(tuple(faults))
    return model


def own_names(spec: ModelSpec) -> dict[str, JsonValue]:
    """The overrides of a model that resolves, by our names of what they override."""
    return {_FIELD_OF[key]: value for key, value in spec.overrides.items()}


def _config(spec: ModelSpec, base_dir: Path) -> Mapping[str, object]:
    if spec.preset is not None:
        return PRESET_CONFIGS[spec.preset]
    return moe_section(_read_config(base_dir / str(spec.hf_config)))


def _read_config(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        raise ModelError((("", f"no such file: {path}"),))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError((("", f"{path} is not JSON: {error}"),)) from None
    if not isinstance(config, dict):
        raise ModelError((("", f"{path} holds no JSON object"),))
    return config


def _apply_overrides(
    config: Mapping[str, object],
    overrides: Mapping[str, object],
    faults: list[tuple[str, str]],
) -> Mapping[str, object]:
    """The config with each override in its field's place; wrong names become ``faults``."""
    result, seen = dict(config), dict[str, str]()
    for key, value in overrides.items():
        field = _FIELD_OF.get(key)
        if field is None or not _names_field(key, field, config):
            faults.append((f"overrides.{key}", _unknown(key, config)))
        elif field in seen:
            faults.append((f"overrides.{key}", f"says the same as {seen[field]!r}; keep one"))
        else:
            seen[field] = key
            result = {k: v for k, v in result.items() if k not in CONFIG_NAMES[field]}
            result[key] = value
    return result


def _name_in_use(field: str, config: Mapping[str, object]) -> str | None:
    return next((key for key in CONFIG_NAMES[field] if config.get(key) is not None), None)


def _names_field(key: str, field: str, config: Mapping[str, object]) -> bool:
    """Whether ``key`` means ``field`` here: our name, the model's own, or one that it lacks.

    A dense ``intermediate_size`` beside ``moe_intermediate_size`` does not touch the MoE layer.
    """
    return key == field or _name_in_use(field, config) in (None, key)


def _unknown(key: str, config: Mapping[str, object]) -> str:
    known = [_name_in_use(field, config) or field for field in CONFIG_NAMES]
    field = _FIELD_OF.get(key)
    meant = f"; did you mean {_name_in_use(field, config)!r}?" if field else ""
    guess = meant or did_you_mean(key, known)
    return f"changes nothing in this model's MoE layer{guess or '; known: ' + ', '.join(known)}"


def _in_section(fault: tuple[str, str], spec: ModelSpec) -> tuple[str, str]:
    key, message = fault
    if key in spec.overrides:
        return f"overrides.{key}", message
    where = "hf_config" if spec.hf_config is not None else "preset"
    return where, f"{key}: {message}" if key else message
