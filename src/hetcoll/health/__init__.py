"""What went wrong, and who finds it out: status reports, the desync report, verdicts."""
