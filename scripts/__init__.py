"""Programs for users: `python scripts/NAME.py`."""
