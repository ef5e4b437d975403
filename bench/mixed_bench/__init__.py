"""Parts of bench_mixed: the arrivals, the cluster on its cores, the load, the picture."""
