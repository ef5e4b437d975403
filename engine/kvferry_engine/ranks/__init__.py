"""A node's tensor-parallel ranks: processes that compute every step together, one of them the service itself."""
