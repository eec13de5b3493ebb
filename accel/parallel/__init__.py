"""How one job is split over processes."""
