"""From a checked call to one that runs: the planner, the host executor, messages, groups of ranks."""
