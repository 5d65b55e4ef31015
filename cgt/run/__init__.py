"""One run of a function, op by op: who observes it, and what else comes to light in it."""
