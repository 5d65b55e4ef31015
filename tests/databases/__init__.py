"""What PyTorch tests itself with, through `cgt.jit` beside eager: the databases that its wheel brings.

    python -m tests.databases                                    all of it: rows as JSON, the page docs/parity.md
    python -m tests.databases --kinds ops --ways forward         one database, in one way
    python -m tests.databases --names 'linalg.*' --most 3        of some names, three samples each

`entries` makes programs of a database's samples, `judge` runs one of them, `runner` runs them in processes of
their own, so that one that crashes or hangs is counted, and `page` writes the table. `skips` holds what is left out.
"""
