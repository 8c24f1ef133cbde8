"""The one exception of this package."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, ambiguous, or does not fit what it is read into.

    The message names the file and the tensor (or the leaf of a tree), what was found, and what to
    do about it. It is raised before any weight is read wherever the fault can be seen by then.
    """
