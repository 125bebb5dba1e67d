"""What the exact part has to say of one cell, or of the whole run."""

from dataclasses import dataclass

from harness.errors import BadInput


class GateError(BadInput):
    """Nothing to judge by; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`case_id` is empty where the finding is about the whole run; `message` is shown after `kind`, unrepeated."""

    case_id: str
    kind: str
    message: str
    fails: bool
