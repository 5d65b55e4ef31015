"""What becomes of a call: replayed, recorded, eager; and whether a replay was right."""
