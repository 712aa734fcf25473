"""A model over HTTP, as OpenAI's clients speak: completions, chats, metrics."""

from turbojax import _extras

try:
    import prometheus_client as _prometheus_client
    import starlette as _starlette
    import uvicorn as _uvicorn
except ImportError as _error:
    raise ImportError(
        f"turbojax.server needs the package {_error.name}: {_extras.install('server')}"
    ) from _error

from turbojax.server.app import create_app as create_app
from turbojax.server.running import Server as Server
from turbojax.server.running import address_of as address_of
from turbojax.server.running import listen as listen
from turbojax.server.running import serve as serve
from turbojax.server.service import Limits as Limits

del _prometheus_client, _starlette, _uvicorn
