"""What caches cost on real text: scored through the cache, layer by layer, and by recall."""

from turbojax.evaluation.answering import PreparedTasks as PreparedTasks
from turbojax.evaluation.answering import TaskMeasure as TaskMeasure
from turbojax.evaluation.answering import prepare_tasks as prepare_tasks
from turbojax.evaluation.intervals import Interval as Interval
from turbojax.evaluation.intervals import bootstrap as bootstrap
from turbojax.evaluation.methods import Method as Method
from turbojax.evaluation.methods import method as method
from turbojax.evaluation.records import Records as Records
from turbojax.evaluation.run import MEASURES as MEASURES
from turbojax.evaluation.run import Further as Further
from turbojax.evaluation.run import Report as Report
from turbojax.evaluation.run import Settings as Settings
from turbojax.evaluation.run import evaluate as evaluate
from turbojax.evaluation.scoring import ExactRun as ExactRun
from turbojax.evaluation.scoring import Scores as Scores
from turbojax.evaluation.scoring import score as score
from turbojax.evaluation.task_scores import compare_answers as compare_answers
from turbojax.evaluation.task_scores import task_scores as task_scores
from turbojax.evaluation.tasks import Task as Task
from turbojax.evaluation.tasks import read_tasks as read_tasks
from turbojax.evaluation.texts import Text as Text
from turbojax.evaluation.texts import windows as windows
