"""A campaign that tries to break hetcoll: random programs, attacked, held to a model; each follows from its seed.

``python -m campaign 50000`` in tests/ runs so many, ``--seed N`` one (`__main__`). `program` draws a program from a
seed, `play` runs it on a rank, `lane` on the processes that stay for many programs, and `verdict` says what is wrong.
"""
