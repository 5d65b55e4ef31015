"""Numbers of Python's that live in a recording, and addresses that its nodes are told."""
