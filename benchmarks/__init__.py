"""What the library costs, beside its peers. `python -m benchmarks.attention --help`."""
