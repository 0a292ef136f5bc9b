"""The errors whose message, not whose traceback, is for the user."""


class UserError(Exception):
    """Wrong input: the message names the field, the value seen, what was expected and the remedy. Exit code 2."""


class TrainingStopped(Exception):
    """Training ended itself before an update that would have done damage; the last checkpoint is good. Exit code 3."""
