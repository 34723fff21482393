"""What went wrong with the hub, told as one error that a person can act on, and that keeps the true cause."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tinyllm.errors import (
    DoesNotFitError,
    GatedRepositoryError,
    HubError,
    ModelNotFoundError,
    OfflineError,
    TinyllmError,
)
from tinyllm.hub import cache

__all__ = ["told"]

_HTTP_LIBRARIES = ("httpx", "httpx2", "requests")  # what one or another huggingface_hub speaks through


@contextmanager
def told(repo: str) -> Iterator[None]:
    """Turn the hub library's errors about `repo` into ours, and keep its log of retries off the terminal."""
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    except Exception as error:
        foreseen = _foreseen(repo, error)
        if foreseen is None:
            raise
        raise foreseen from error
    finally:
        logging.set_verbosity(verbosity)


def _foreseen(repo: str, error: BaseException) -> TinyllmError | None:
    """Return our error for the library's; None where there is nothing to add."""
    from huggingface_hub import errors

    hub = cache.hub_address()
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _foreseen(repo, error.__cause__)
    if isinstance(error, errors.GatedRepoError):
        return GatedRepositoryError(
            f"{repo}: is gated: accept its licence at {hub}/{repo} while logged in, then set a token:"
            " hf auth login, or HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{repo}: the hub has the repository, but no such revision of it")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"{repo}: the hub ({hub}) has no such repository, or it is a private one and needs a token"
            " (hf auth login, or HF_TOKEN)"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(repo, hub, error.response.status_code)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return OfflineError(f"{repo}: HF_HUB_OFFLINE forbids asking the hub for it")
    if type(error).__module__.split(".")[0] in _HTTP_LIBRARIES:
        return HubError(f"{repo}: the hub ({hub}) cannot be reached: {_one_line(error)}")
    if isinstance(error, OSError):
        return _disk_or_download(repo, error)
    return None


def _refusal(repo: str, hub: str, status: int) -> HubError:
    if status in (401, 403):
        return GatedRepositoryError(
            f"{repo}: the hub ({hub}) refuses the token that is set, or this model to it: hf auth login, or HF_TOKEN"
        )
    return HubError(f"{repo}: the hub ({hub}) answered {status}: try again later")


def _disk_or_download(repo: str, error: OSError) -> TinyllmError | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DoesNotFitError(
            f"{repo}: the disk of {cache.cache_folder()} is full: make room and pull again; what has arrived is kept"
        )
    if error.errno is None:  # the library's word for a download that came out short
        return HubError(f"{repo}: the download broke off, pull again to go on: {_one_line(error)}")
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
