"""The core of recipes with a field's libraries.

A recipe is a module with a `DOMAIN`, and with `main = partial(run_command_line, DOMAIN)`. It writes three classes:

    @dataclass(frozen=True)
    class VolumeSettings(DomainSettings):                   # each field is an option of the command line
        patch: int = setting(48, "voxels along an edge of a patch", type=int)

    class VolumeTask(Task):                                 # one training; `Task` documents the methods
        def __init__(self, settings, seed, device): ...     # sets model, optimizer, steps_per_epoch
        def batches(self, epoch): ...                       # yields batches, from the seed and the epoch alone
        def loss(self, batch): ...                          # forward pass and loss; runs inside of the region
        def evaluate(self): ...                             # the metric
        def use_checkpoints(self): ...                      # gradient checkpointing of the model's blocks

    DOMAIN = Domain(
        module="recipes.segmentation3d", description=__doc__, settings=VolumeSettings, task=VolumeTask,
        metric=Metric("dice", "Dice", higher_is_better=True), libraries=("monai",),
    )

The core does the rest: `domains.training` trains each variant (plain, checkpoint, policies) from equal weights on equal
batches for each seed, resumes, and shows progress; `domains.results` writes the table and a picture;
`domains.command_line` is the command line. A recipe imports its library inside of functions, by `library("monai")`,
which names missing packages.
"""

from recipes.domains.command_line import run_command_line
from recipes.domains.domain import Domain, DomainSettings, Metric, Task, checkpoint_each, library

__all__ = ["Domain", "DomainSettings", "Metric", "Task", "checkpoint_each", "library", "run_command_line"]
