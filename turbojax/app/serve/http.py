"""`turbojax serve --http`: a model behind an address, from the first check to the last answer."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from turbojax import _checks, _garbage, _interrupt
from turbojax.app import terminal
from turbojax.app.serve import settings as serve_settings
from turbojax.app.serve.run import ServingReport, report_of
from turbojax.app.serve.settings import Models, Pool, Settings
from turbojax.app.text_model import FoundModel
from turbojax.models import Engine, Replicas

API_KEY_VARIABLE = "TURBOJAX_API_KEY"
_LARGEST_PORT = 2**16 - 1


@dataclasses.dataclass(frozen=True)
class Address:
    """Where clients connect: a name or an IPv4 or IPv6 address, and a port, 0 for any free one."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> "Address":
        """Reads ``HOST:PORT``, ``[IPV6]:PORT`` or ``:PORT`` (this machine only), or ValueError."""
        found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^:\[\]/\s]*)):(\d{1,5})", text)
        if found is None or int(found.group(3)) > _LARGEST_PORT:
            raise ValueError(
                f"--http {text!r} must be HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000, with a "
                f"port of at most {_LARGEST_PORT}"
            )
        return Address(found.group(1) or found.group(2) or "127.0.0.1", int(found.group(3)))


def api_keys(given: Sequence[str]) -> tuple[str, ...]:
    """Keys of the command line, or else the environment; ValueError for empty ones or spaces."""
    keys = list(given) or os.environ.get(API_KEY_VARIABLE, "").split()
    for key in keys:
        if not key or key != "".join(key.split()):
            raise ValueError("--api-key must not be empty, nor have spaces in it")
    return tuple(keys)


def served_name(given: str | None, model: str | None, random_weights: str | None) -> str:
    """What clients call the model: the user's name (ValueError if empty), the shape or folder."""
    if given is not None and not given.strip():
        raise ValueError(f"--served-name {given!r} must not be empty")
    if given is not None:
        return given
    return random_weights or ("embedded" if model is None else Path(model).resolve().name)


def plan_server(found: FoundModel, draft: FoundModel | None, settings: Settings) -> Pool:
    """The sizes of the engine; ValueError if a number or the whole does not fit."""
    sizes = settings.sizes(found.config.max_length)
    needs = serve_settings.bytes_besides(found, draft, settings, sizes)
    pool = serve_settings.plan(
        Models.of(found, draft),
        settings,
        max_length=found.config.max_length,
        free_bytes=serve_settings.free_for_pages(needs, modest=True),
    )
    serve_settings.check_memory(pool, settings, needs)
    return pool


def serve_http(
    address: Address,
    find: Callable[[], tuple[FoundModel, FoundModel | None]],
    settings: Settings,
    *,
    name: str,
    keys: Sequence[str] = (),
    max_waiting: int = 1024,
) -> ServingReport:
    """Serves a model until SIGINT or SIGTERM; requests that run then come to their end.

    The address is taken before the model is loaded. `find` finds the model, and the draft model if
    there is one. Clients must show one of `keys`, if there are any; `max_waiting` requests may
    wait.
    """
    from turbojax.server import listen, serve

    _checks.check_sizes(max_waiting=max_waiting)
    with contextlib.closing(listen(address.host, address.port)) as listening:
        found, draft = find()
        pool = plan_server(found, draft, settings)
        model = found.load()
        small = None if draft is None else draft.load().decoder
        engine = serve_settings.make_engine(model.decoder, model.tokenizer, settings, pool, small)
        compile_ahead_of_time(engine)

        def ready(url: str) -> None:
            typer.echo(f"turbojax serve: {name} on {url}, Ctrl-C ends it", err=True)

        # The server handles signals itself: it ends after the requests that it has begun.
        with _interrupt.elsewhere(), _garbage.only_of_new_objects():
            serve(
                engine,
                model.tokenizer,
                name=name,
                listening=listening,
                api_keys=keys,
                max_waiting=max_waiting,
                ready=ready,
            )
    return report_of(engine, settings, pool, engine.statistics().finished)


def compile_ahead_of_time(engine: Engine | Replicas) -> None:
    """Compiles the engine's programs, with a bar that counts them."""
    bar = terminal.progress_bar(transient=True)
    if not bar.console.is_terminal:
        typer.echo("compiling", err=True)
        engine.compile()
        return
    task = bar.add_task("compiling", total=None)
    with bar:
        engine.compile(lambda done, total: bar.update(task, completed=done, total=total))
