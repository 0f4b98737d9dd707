"""What the user has set and what the host has: the one place that reads the environment."""
