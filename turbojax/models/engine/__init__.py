"""Continuous batching: requests that come at any time, through one model and one pool of pages."""

from turbojax.models.engine.asynchronous import AsyncEngine as AsyncEngine
from turbojax.models.engine.asynchronous import EngineClosed as EngineClosed
from turbojax.models.engine.asynchronous import EngineEnded as EngineEnded
from turbojax.models.engine.asynchronous import QueueFull as QueueFull
from turbojax.models.engine.asynchronous import RequestHandle as RequestHandle
from turbojax.models.engine.engine import Engine as Engine
from turbojax.models.engine.placement import replicate as replicate
from turbojax.models.engine.replicas import Replicas as Replicas
from turbojax.models.engine.requests import Event as Event
from turbojax.models.engine.requests import Finished as Finished
from turbojax.models.engine.requests import NewToken as NewToken
from turbojax.models.engine.requests import Request as Request
from turbojax.models.engine.requests import Result as Result
from turbojax.models.engine.requests import TokenLogprobs as TokenLogprobs
from turbojax.models.engine.requests import best_of as best_of
from turbojax.models.engine.speculation import Draft as Draft
from turbojax.models.engine.speculation import NGram as NGram
from turbojax.models.engine.statistics import EngineStatistics as EngineStatistics
from turbojax.models.generation.sampling import Sampling as Sampling
