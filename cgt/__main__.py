"""`python -m cgt doctor SCRIPT [its arguments]`: run a program, and tell what keeps the functions that it jits from
being replayed."""

import sys

from cgt.doctor import examine

if __name__ == "__main__":
    if sys.argv[1:2] != ["doctor"] or len(sys.argv) < 3:
        print("usage: python -m cgt doctor script.py [its arguments]", file=sys.stderr)
        sys.exit(2)
    examine(sys.argv[2], sys.argv[3:])
