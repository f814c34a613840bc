"""What a check found, as one line."""

import typing

OK, WARNING, MISSING = "ok", "warning", "missing"


class Finding(typing.NamedTuple):
    """state: OK; WARNING, where it costs something; MISSING, where nothing goes without it.

    mend: the command that mends it, with what there is to say about it.
    """

    state: str
    name: str
    found: str
    mend: str = ""


def line(finding: Finding) -> str:
    """The line of a finding; scripts/artifact writes its own in the same columns."""
    text = f"{finding.state:<8} {finding.name:<16} {finding.found}"
    return text + (f". Mend it with: {finding.mend}" if finding.mend else "")
