"""`hetcoll doctor`: what this machine offers, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..tools.checks import Finding, Level, run_checks

_WIDTH = 118


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The form of the answer."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.epilog = "The exit status is 1 where there is a problem: something that is there and does not work."


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print what the checks found; 1 where one found a problem."""
    findings = run_checks()
    print(json.dumps(document(findings), indent=1) if args.json else text(findings), flush=True)
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as JSON values."""
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    return {"schema": 1, "problems": problems, "findings": [asdict(finding) for finding in findings]}


def text(findings: Sequence[Finding]) -> str:
    """A line for each finding, and below it what to do."""
    width = max((len(finding.about) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        lead = f"{finding.level:<8} {finding.about:<{width}}  "
        parts = [finding.text] + ([f"to do: {finding.advice}"] if finding.advice else [])
        for part in parts:
            lines += textwrap.wrap(
                part, max(_WIDTH, len(lead) + 40), initial_indent=lead, subsequent_indent=" " * len(lead)
            )
            lead = " " * len(lead)
    return "\n".join(lines)
