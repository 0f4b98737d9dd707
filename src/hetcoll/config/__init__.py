"""What the user has set: the one place that reads the environment."""
