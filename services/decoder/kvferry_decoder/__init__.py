"""The decoder: page reservations, KV arrival, continuous batching, sampling."""
