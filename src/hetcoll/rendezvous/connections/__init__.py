"""How the processes of a job reach each other, and prove that they belong to it."""
