"""Vectors in 4, 3 or 2 bits per coordinate and one norm: the codec of turbo4 and its relatives.

A fixed random rotation makes the coordinates of any vector nearly normal, and each is then rounded
to the nearest centroid of one scalar quantizer (PolarQuant, Han et al., 2025; Lloyd, 1982; Max,
1960). The norm is corrected so that the decoded vector has the length of the encoded one.
"""

from turbojax.polar.centroids import centroids as centroids
from turbojax.polar.centroids import integer_centroids as integer_centroids
from turbojax.polar.centroids import lloyd_max as lloyd_max
from turbojax.polar.codec import decode as decode
from turbojax.polar.codec import encode as encode
from turbojax.polar.codec import from_interchange as from_interchange
from turbojax.polar.codec import to_interchange as to_interchange
from turbojax.polar.packing import pack as pack
from turbojax.polar.packing import packed_width as packed_width
from turbojax.polar.packing import unpack as unpack
from turbojax.polar.rotation import Rotation as Rotation
from turbojax.polar.rotation import rotate as rotate
from turbojax.polar.rotation import rotation as rotation
from turbojax.polar.rotation import unrotate as unrotate
