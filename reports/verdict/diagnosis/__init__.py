"""What kind of mistake a deviation looks like: hypotheses fitted against the values behind it."""

from reports.verdict.diagnosis.case import Scene
from reports.verdict.diagnosis.explanation import Certainty, Diagnosis
from reports.verdict.diagnosis.hypotheses import diagnose

__all__ = ["Certainty", "Diagnosis", "Scene", "diagnose"]
