"""Benchmarks: ratios of things measured side by side in one run, on a machine that the result names."""
