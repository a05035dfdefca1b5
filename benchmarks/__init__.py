"""Cost of the library, compared with its peers: see `python -m benchmarks.attention --help`."""
