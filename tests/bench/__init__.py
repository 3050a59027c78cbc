"""The figures: ours beside what a user would use instead, measured in one run. Never part of `make test`."""
