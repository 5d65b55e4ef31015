"""One recording, from what is planned to the rows of the core."""
