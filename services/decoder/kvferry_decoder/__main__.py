"""`python -m kvferry_decoder`."""

from kvferry_decoder.cli import command

command()
