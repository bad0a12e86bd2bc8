"""Errors of the house, named by whose fault it is. Messages read: cannot <do> <what>: <why>."""


class SuperviseError(Exception):
    """Base of all our errors."""


class ContractError(SuperviseError):
    """A file or message between daemon and ranks is not what the contract says."""


class CheckpointError(SuperviseError):
    """A checkpoint cannot be written, read or trusted."""
