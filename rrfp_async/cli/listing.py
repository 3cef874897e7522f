"""`hints`: which hint orders there are."""

import typer

from rrfp_async.hints import FILES, HINTS

app = typer.Typer()


@app.command("hints")
def list_hints() -> None:
    """List the hint orders, one line each."""
    for name, hint in HINTS.items():
        typer.echo(f"{name:<16}{hint.summary}")
    for form, (summary, _) in FILES.items():
        typer.echo(f"{form:<16}{summary}")
