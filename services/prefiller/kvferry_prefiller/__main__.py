"""`python -m kvferry_prefiller`."""

from kvferry_prefiller.cli import command

command()
