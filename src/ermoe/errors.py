"""The one exception that means: the user can mend this."""


class UserError(ValueError):
    """A mistake a person can correct. The command line prints its one sentence and exits with code 2."""
