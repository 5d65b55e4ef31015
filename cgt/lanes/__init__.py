"""Ops of a recording side by side: which may run beside each other, on which stream, and whether that pays."""
