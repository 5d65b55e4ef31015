"""Where a recording ends a segment: values that Python reads, work of the host's, forks."""
