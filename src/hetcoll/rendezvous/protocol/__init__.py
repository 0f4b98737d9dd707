"""What the processes of a job say to its store, to their relay and to each other: frames and what is in them."""
