"""Which keys of a scenario made a rule refuse it: found by watching the rule read."""

from typing import Final, cast

from scenarios.models import MoeModel
from scenarios.rules import MODEL_RULES, SCENARIO_RULES, BrokenRule, waived_kinds
from scenarios.rules.rule import RuleKind, Sized
from scenarios.schema import Scenario
from scenarios.sections import Spec

_OF_SCENARIOS: Final = {rule.name: rule for rule in SCENARIO_RULES}
_OF_MODELS: Final = {rule.name: rule for rule in MODEL_RULES}


def keys_behind(broken: BrokenRule, scenario: Scenario, model: MoeModel | None) -> frozenset[str]:
    """The dotted keys whose values made the rule refuse this scenario.

    A check is a function of what it reads: every scenario with the same values at these keys is
    refused by the same rule. What is read of the model stands as the section ``model``.

    Args:
        broken: as ``check_rules`` found it.
        scenario: complete.
        model: what it names; None where only rules without sizes were checked.
    """
    read: set[str] = set()
    watched = cast(Scenario, _Watched(scenario, "", read))
    if broken.name in _OF_SCENARIOS:
        message = _OF_SCENARIOS[broken.name].check(watched)
    else:
        assert model is not None, "rules on sizes are checked with a model alone"
        read.add("model")
        message = _OF_MODELS[broken.name].check(Sized(watched, model))
    assert message == broken.message, f"{broken.name} says something else when it is watched"
    if broken.kind is not RuleKind.SEMANTIC:
        waived_kinds(watched, frozenset(Scenario.model_fields))
    return frozenset(read)


class _Watched:
    """A section that writes down which of its values are read; whole, if in any other way."""

    def __init__(self, spec: Spec, path: str, read: set[str]) -> None:
        self._spec, self._path, self._read = spec, path, read

    def __getattr__(self, name: str) -> object:
        value = getattr(self._spec, name)
        if name not in type(self._spec).model_fields:
            self._read.update(self._whole())
            return value
        path = f"{self._path}.{name}" if self._path else name
        if isinstance(value, Spec):
            return _Watched(value, path, self._read)
        self._read.add(path)
        return value

    def __eq__(self, other: object) -> bool:
        self._read.update(self._whole())
        return self._spec == (other._spec if isinstance(other, _Watched) else other)

    def __hash__(self) -> int:
        self._read.update(self._whole())
        return hash(self._spec)

    def _whole(self) -> set[str]:
        return {self._path} if self._path else set(type(self._spec).model_fields)
