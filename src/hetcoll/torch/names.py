"""What torch calls the backend, and whose tensors it takes."""

NAME = "hetcoll"
DEVICES = ["cpu", "cuda"]  # ROCm's tensors are "cuda" to torch
