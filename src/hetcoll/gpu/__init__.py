"""The GPU executor: calls on device memory become work on streams."""
