"""Open a request, choose every value, return a `Run`."""
