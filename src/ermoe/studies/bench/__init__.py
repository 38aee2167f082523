"""Side-by-side benchmarks: every candidate in one run, as ratios to a floor."""
