"""A judged run in one sentence."""

from collections.abc import Sequence

from actors.result_rows import ModeRun, extent_of
from reports.result import Confidence, Divergence, Finding
from reports.verdict.rules import QUANTISER
from scenarios.loader import LoadedScenario


def summary_of(loaded: LoadedScenario, runs: Sequence[ModeRun], findings: Sequence[Finding]) -> str:
    """The sentence of a judged run: what comes first of all that was found, or what came closest.

    Args:
        loaded: the scenario.
        runs: its judged forwards; at least one has a stage that was looked at, or no token is.
        findings: in the order of blame.
    """
    tokens, ranks = sum(loaded.scenario.batch.tokens), loaded.scenario.parallel.world_size
    if findings:
        return f"discrepancy: {_where(findings[0])}: {_named(findings[0])}{_what(findings[0])}"
    if tokens == 0:
        return f"agree: no token on any of {ranks} ranks; accounts and contracts hold"
    (stage, rank), worst = max(
        ((key, worst) for run in runs for key, worst in run.judgement.ledger.worst.items()),
        key=lambda item: item[1],
    )
    judged, left_out = extent_of(runs)
    return (
        f"agree: {ranks} ranks, {tokens} tokens; {judged} within its band; "
        f"closest: stage {stage} on rank {rank}, at {worst:.3f} of its band{left_out}"
    )


def _where(divergence: Divergence) -> str:
    places = [f"stage {divergence.stage}", f"rank {divergence.rank}"]
    if divergence.round > 1:
        places.append(f"round {divergence.round}")
    for name in ("token", "slot", "expert"):
        value = getattr(divergence, name)
        if value is not None:
            places.append(f"{name} {value}")
    return ", ".join(places)


def _named(finding: Finding) -> str:
    """What kind of mistake it looks like, if it looks like any; guesses are called so."""
    if finding.mistake is None:
        return ""
    perhaps = "perhaps " if finding.confidence is Confidence.LOW else ""
    return f"{perhaps}{finding.diagnosis}; "


def _what(divergence: Divergence) -> str:
    if divergence.got is None or divergence.want is None:
        return f"{divergence.tensor}: {divergence.detail}"
    if divergence.check.startswith("determinism"):
        values = f"{divergence.got:.9g}, and {divergence.want:.9g} of the same token"
        return f"{divergence.tensor} is {values} ({divergence.check})"
    if divergence.check == QUANTISER:
        return _what_of_a_quantiser(divergence)
    band = f" (band {divergence.band:.3g})" if divergence.band else ""
    return f"{divergence.tensor} is {divergence.got:.6g}, not {divergence.want:.6g}{band}"


def _what_of_a_quantiser(divergence: Divergence) -> str:
    """A code is no value, so what says most is how far the values are off, and why."""
    unit = "" if divergence.tensor.endswith("_scale") else "code "
    said = f"{divergence.tensor} is {unit}{divergence.got:.6g}, not {divergence.want:.6g}"
    return f"{said}; {divergence.size}" if divergence.size else said
