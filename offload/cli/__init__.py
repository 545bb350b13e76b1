"""The `offload` command."""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Tools for training from NVMe.")


@app.callback()
def root() -> None:
    """A group even while it has one command, so that its name stays part of the command line."""


@app.command()
def doctor(
    path: Annotated[
        str, typer.Argument(help="A file or folder of the file system that will be swapped to.")
    ] = ".",
) -> None:
    """Tell which I/O backend works here and why, the system's limits, and what the path takes."""
    from offload.cli.doctor import examine

    healthy, lines = examine(path)
    for line in lines:
        typer.echo(line)
    raise typer.Exit(0 if healthy else 1)


def main() -> None:
    app()
