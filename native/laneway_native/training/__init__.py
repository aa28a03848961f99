"""LoRA training in a child process: ``python -m laneway_native.training`` reads a :class:`Job` and reports events."""

from __future__ import annotations

from laneway_native.training._files import CheckpointInfo as CheckpointInfo
from laneway_native.training._files import checkpoint_info as checkpoint_info
from laneway_native.training._files import remove_checkpoint as remove_checkpoint
from laneway_native.training._job import BASES as BASES
from laneway_native.training._job import MODULES as MODULES
from laneway_native.training._job import SCHEDULES as SCHEDULES
from laneway_native.training._job import Checkpoint as Checkpoint
from laneway_native.training._job import Done as Done
from laneway_native.training._job import Error as Error
from laneway_native.training._job import Event as Event
from laneway_native.training._job import Job as Job
from laneway_native.training._job import Paused as Paused
from laneway_native.training._job import Settings as Settings
from laneway_native.training._job import Started as Started
from laneway_native.training._job import Step as Step
from laneway_native.training._job import TrainingError as TrainingError
from laneway_native.training._job import Validation as Validation
from laneway_native.training._job import event_from_json as event_from_json
from laneway_native.training._job import event_to_json as event_to_json
from laneway_native.training._plan import ARCHITECTURES as ARCHITECTURES
from laneway_native.training._plan import Plan as Plan
from laneway_native.training._plan import estimate as estimate
from laneway_native.training._plan import plan as plan
from laneway_native.training._plan import trainable as trainable
from laneway_native.training._trainer import Sample as Sample
from laneway_native.training._trainer import Trainer as Trainer
