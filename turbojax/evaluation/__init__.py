"""What caches cost on real text: scored through the cache, layer by layer, and by recall."""

from turbojax.evaluation.intervals import Interval as Interval
from turbojax.evaluation.intervals import bootstrap as bootstrap
from turbojax.evaluation.layers import Errors as Errors
from turbojax.evaluation.layers import LayerErrors as LayerErrors
from turbojax.evaluation.layers import layer_errors as layer_errors
from turbojax.evaluation.methods import Method as Method
from turbojax.evaluation.methods import method as method
from turbojax.evaluation.recall import Answers as Answers
from turbojax.evaluation.recall import recall as recall
from turbojax.evaluation.recall_items import Item as Item
from turbojax.evaluation.recall_items import Source as Source
from turbojax.evaluation.recall_items import make_item as make_item
from turbojax.evaluation.records import Records as Records
from turbojax.evaluation.run import MEASURES as MEASURES
from turbojax.evaluation.run import Further as Further
from turbojax.evaluation.run import Settings as Settings
from turbojax.evaluation.run import evaluate as evaluate
from turbojax.evaluation.run import text_row as text_row
from turbojax.evaluation.scoring import ExactRun as ExactRun
from turbojax.evaluation.scoring import Scores as Scores
from turbojax.evaluation.scoring import score as score
from turbojax.evaluation.texts import windows as windows
