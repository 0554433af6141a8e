"""For which results tensors are kept; without torch, for the command line reads it first."""

from enum import StrEnum


class SaveTensors(StrEnum):
    """For which results ``tensors.safetensors`` is written."""

    NONE = "none"
    FAILED = "failed"
    ALL = "all"

    def keeps(self, *, agrees: bool) -> bool:
        """Whether a result's tensors are kept; ``failed`` are all that do not agree."""
        return self is SaveTensors.ALL or (self is SaveTensors.FAILED and not agrees)
