"""Every failure that tinyllm foresees, one cause each.

    TinyllmError                      exit 1, one line
    ├── UsageError                    exit 2: a flag or value that cannot be meant
    ├── BackendError                  no usable MLX, or not the device that was asked for
    ├── ModelNotFoundError            no such folder or repository, or the embedded model is not fetched
    ├── HubError                      the hub does not give what it has, or cannot be reached
    │   ├── GatedRepositoryError      a licence to accept, or a token to set
    │   └── OfflineError              not on this machine, and connections are forbidden
    ├── DoesNotFitError               more memory or disk than this machine has
    ├── SettingsError                 the file with the person's choice cannot be read or written
    ├── ConfigError                   config.json cannot be read as a supported model
    │   ├── MissingKeyError           a key without a default is absent
    │   ├── UnknownKeyError           a key that would change the numbers in an unknown way
    │   └── UnsupportedModelError     a model_type or variant that tinyllm does not compute
    ├── CheckpointError               the files do not hold what they must
    │   ├── CorruptFileError          a header or an offset disagrees with the file
    │   ├── UnsafePathError           a path that leaves the checkpoint's folder
    │   ├── MissingFileError          a file that the index names, or all weights, are absent
    │   ├── TensorMismatchError       missing, surplus or mis-shaped tensors, grouped
    │   └── UnsupportedQuantizationError
    ├── TokenizerError                tokenizer.json is absent, broken or disagrees with the weights
    ├── ChatTemplateError             the template is absent, broken, unsafe, or rejects the messages
    ├── ContextLengthError            more tokens than the model can attend to
    ├── PrefixFileError               a saved prefix is damaged, or was made with something else
    ├── ChatFileError                 a saved conversation is absent, damaged, or cannot be written
    ├── NonFiniteLogitsError          the network produced inf or NaN
    ├── SlowerError                   exit 3: a benchmark is slower than an earlier one by more than was allowed
    └── DisagreementError             a checkpoint whose logits are known gives others on this machine

Messages are one line: what is wrong, where, and what to do next. `cli` prints them and exits with `exit_code`.
"""

from __future__ import annotations


class TinyllmError(Exception):
    """A foreseen failure; `str()` of it is the one line a user reads."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the message as one line, fit for a terminal: what comes from files may hold anything."""
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


class UsageError(TinyllmError):
    """A flag or value that cannot be meant."""

    exit_code = 2


class BackendError(TinyllmError):
    """No usable MLX is installed, or not the device that was asked for."""


class ModelNotFoundError(TinyllmError):
    """There is no such model folder or repository, or the embedded model has not been fetched."""


class HubError(TinyllmError):
    """The hub does not give what it has, or cannot be reached."""


class GatedRepositoryError(HubError):
    """The hub asks for an accepted licence, or for a token."""


class OfflineError(HubError):
    """A model is not on this machine, and connections are forbidden."""


class DoesNotFitError(TinyllmError):
    """A model needs more memory or disk than this machine has."""


class SettingsError(TinyllmError):
    """The file that holds a person's choice cannot be read or written."""


class ConfigError(TinyllmError):
    """config.json cannot be read as a model that tinyllm supports."""


class MissingKeyError(ConfigError):
    """A key of config.json that has no default is absent."""


class UnknownKeyError(ConfigError):
    """A key of config.json that is neither read nor known to be without effect."""


class UnsupportedModelError(ConfigError):
    """A model_type, or a variant that a known key asks for, which tinyllm does not compute."""


class CheckpointError(TinyllmError):
    """The files of a checkpoint do not hold what its config says."""


class CorruptFileError(CheckpointError):
    """A header or an offset disagrees with the file that holds it."""


class UnsafePathError(CheckpointError):
    """A file name in a checkpoint that leads out of its folder."""


class MissingFileError(CheckpointError):
    """A file that the checkpoint needs is absent."""


class TensorMismatchError(CheckpointError):
    """Tensors are missing, surplus or mis-shaped; the message groups them all."""


class UnsupportedQuantizationError(CheckpointError):
    """A quantisation that tinyllm does not read."""


class TokenizerError(TinyllmError):
    """tokenizer.json is absent or broken, or disagrees with the weights."""


class ChatTemplateError(TinyllmError):
    """The chat template is absent, broken or unsafe, or it rejects the messages."""


class ContextLengthError(TinyllmError):
    """A request needs more tokens than the model or the memory can hold."""


class PrefixFileError(TinyllmError):
    """A saved prefix is damaged, or was made with another model or other settings, or from another text."""


class ChatFileError(TinyllmError):
    """A saved conversation is not there, is damaged, or cannot be written."""


class NonFiniteLogitsError(TinyllmError):
    """The network produced inf or NaN, so that no token can be chosen."""


class SlowerError(TinyllmError):
    """A benchmark is slower than an earlier one by more than was allowed."""

    exit_code = 3


class DisagreementError(TinyllmError):
    """A checkpoint whose logits are known gives others on this machine."""
