"""Programs that train models with brevact, each run from a checkout: `python -m recipes.efficientnetv2`.

A recipe is a module with a `RECIPE`, and with `main = partial(command_line.main, RECIPE)`. It writes two classes:

    @dataclass(frozen=True)
    class VolumeSettings(Settings):                         # each field is an option of the command line
        patch: int = setting(48, "voxels along an edge of a patch", least=8)

    class VolumeTask(Task):                                 # one training; `Task` documents the methods
        def __init__(self, settings, seed, device): ...     # sets model, optimizer, steps_per_epoch
        def batches(self, epoch): ...                       # yields batches, from the seed and the epoch alone
        def loss(self, batch): ...                          # forward pass and loss; runs inside of the region
        def evaluate(self): ...                             # the metric
        def use_checkpoints(self): ...                      # gradient checkpointing of the model's blocks

    RECIPE = Recipe(
        module="recipes.segmentation3d", description=__doc__, settings=VolumeSettings, task=VolumeTask,
        metric=Metric("dice", "Dice"), libraries=("monai",),
    )

`recipes.training` trains each variant (plain, checkpoint, policies) from equal weights on equal batches for each seed,
resumes, and shows progress; `recipes.results` writes the table and a picture; `recipes.policies` reads variants. A
recipe imports its library inside of functions, by `library("monai")`, which names missing packages.
"""
