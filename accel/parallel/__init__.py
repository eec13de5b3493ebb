"""Split one job over processes."""
