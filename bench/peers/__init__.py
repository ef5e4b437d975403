"""The parts of bench_peers.py: one program, pair.py, that moves the same pages through one transfer system."""
