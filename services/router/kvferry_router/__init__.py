"""The router: takes requests over HTTP and ZeroMQ, tokenises, places, and carries each one through its attempts."""
