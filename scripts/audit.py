"""The audit: what in the paper does not add up, recomputed from its printed numbers."""

from packedconv.evidence import audit, published
from packedconv.evidence.arguments import table_parser
from packedconv.evidence.tabular import write_table
from packedconv.script import run


def main() -> None:
    arguments = table_parser(__doc__).parse_args()
    findings = audit.audit(published.load(arguments.paper))
    write_table(
        audit.audit_table(findings),
        arguments.out,
        "Audit: what is printed, what follows from it, and what would reconcile the two",
        "tab:audit",
        shown=audit.shown_audit(findings),
        preamble=audit.PREAMBLE,
        column_format="rp{2.5cm}p{4cm}p{5cm}p{4.5cm}l",
        long=True,
    )


if __name__ == "__main__":
    run(main)
