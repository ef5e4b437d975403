"""Parts of bench_engine: one module a system, all with the same two measurements."""
