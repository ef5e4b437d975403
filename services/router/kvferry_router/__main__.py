"""python -m kvferry_router."""

from kvferry_router.cli import command

if __name__ == "__main__":
    command()
