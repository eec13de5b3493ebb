"""The option table and its validation. Imports no torch."""
