"""Images, labels, files and progress. Imports no torch."""
