"""`turbojax demo`: a real model on a real file, through several KV caches side by side."""

from turbojax.app.demo.measure import CacheResult as CacheResult
from turbojax.app.demo.measure import DemoReport as DemoReport
from turbojax.app.demo.measure import DemoSettings as DemoSettings
from turbojax.app.demo.measure import default_file as default_file
from turbojax.app.demo.measure import run as run
