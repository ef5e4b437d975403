"""`python -m kvferry.cli` is `kvferry`."""

from kvferry.cli import main

main()
