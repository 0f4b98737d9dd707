"""The job's store, in rank 0 or in the successor that serves the job after it: who is there, and what all agreed on."""
