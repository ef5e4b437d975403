"""The parts of bench_fabric.py."""
