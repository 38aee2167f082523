"""The paper's tables and figures, and benchmarks beside peers: one record of a run, one queue."""
