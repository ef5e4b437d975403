"""Client library of kvferry."""
