"""What the code that ran can read: byte code, the places that it names, and what lies there."""
