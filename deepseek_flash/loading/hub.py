"""Models of the Hugging Face Hub, through huggingface_hub: its cache, its token, its offline switch.

huggingface_hub is imported inside functions: it takes a while, and most models are local.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepseek_flash.errors import ModelError, ModelNotFound, near_miss
from deepseek_flash.loading.safetensors import INDEX, SINGLE

WANTED = ("*.safetensors", "*.json", "*.jinja")
UNWANTED = ("*/*", "consolidated*")
"""Subfolders (other formats of the same weights), and Mistral's second copy of the weights."""


@dataclass(frozen=True, slots=True)
class HubName:
    """``org/name[@revision][:file.gguf]``, taken apart."""

    repo: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


def fetch(name: HubName, *, progress: bool = True, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """The repo's snapshot folder, or the named GGUF file, from the Hub's cache or the network.

    ModelNotFound, saying what to do, when it is gated, missing, misspelt, or not cached while offline.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    if name.file is not None and not name.file.lower().endswith(".gguf"):
        raise ModelNotFound(f"{name}: only a .gguf file can be named after the colon")
    with _explained(name), _bars(progress):
        files, reachable = _listing(name, endpoint)
        # Without the network the library would retry for half a minute before it looks into the cache.
        common: dict[str, Any] = {"revision": name.revision, "endpoint": endpoint, "cache_dir": cache}
        if name.file is not None:
            if files is not None:
                _check_file(name, files)
            return Path(hf_hub_download(name.repo, name.file, local_files_only=not reachable, **common))
        if files is not None:
            _check_kind(name, files)
        wanted: dict[str, Any] = {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
        return Path(snapshot_download(name.repo, local_files_only=not reachable, **wanted, **common))


def fetch_config(name: HubName, *, endpoint: str | None = None, cache: Path | None = None) -> Path:
    """The repo's ``config.json`` alone, for questions that need no weights. ModelNotFound as ``fetch``."""
    from huggingface_hub import hf_hub_download

    with _explained(name), _bars(False):
        return Path(
            hf_hub_download(name.repo, "config.json", revision=name.revision, endpoint=endpoint, cache_dir=cache)
        )


def _listing(name: HubName, endpoint: str | None) -> tuple[list[str] | None, bool]:
    """The repo's files, and whether the Hub answered. No files (None) when it does not answer or does not tell:
    the cache may still serve, and if not, the download gives the reason."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    try:
        info = HfApi(endpoint=endpoint).model_info(name.repo, revision=name.revision)
    except RevisionNotFoundError:
        raise
    except HfHubHTTPError:
        return None, True
    except Exception:  # the transport's own exceptions have no common base across the library's versions
        return None, False
    return sorted(s.rfilename for s in info.siblings or ()), True


def _check_file(name: HubName, files: Sequence[str]) -> None:
    if name.file not in files:
        ggufs = [f for f in files if f.lower().endswith(".gguf")]
        there = f"; it has {', '.join(ggufs[:20])}" if ggufs else ""
        raise ModelNotFound(f"{name.repo} has no file {name.file!r}{near_miss(name.file or '', ggufs)}{there}")


def _check_kind(name: HubName, files: Sequence[str]) -> None:
    """ModelNotFound, with the choice there is, for a repo that a folder of safetensors cannot be made of."""
    if SINGLE in files or INDEX in files:
        return
    ggufs = [f for f in files if f.lower().endswith(".gguf")]
    if ggufs:
        shown = ", ".join(ggufs[:20]) + (f" and {len(ggufs) - 20} more" if len(ggufs) > 20 else "")
        raise ModelNotFound(f"{name} holds GGUF files; name one, as {name}:{ggufs[0]}. There are: {shown}")
    if any(f.endswith((".bin", ".pt", ".pth")) for f in files):
        raise ModelNotFound(
            f"{name} has only pickled weights, which are never opened; look for a repo with safetensors or GGUF files"
        )
    raise ModelNotFound(f"{name} has neither {SINGLE} nor {INDEX} nor GGUF files ({', '.join(files[:10]) or 'empty'})")


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Every failure of the Hub's library as a ModelNotFound that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError:
        raise ModelNotFound(
            f"{name.repo} is gated: accept its licence at https://huggingface.co/{name.repo} and log in "
            f"(`hf auth login`, or HF_TOKEN)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFound(
            f"the Hub has no repo {name.repo!r} that you may see: check the spelling; a private one needs a login "
            f"(`hf auth login`, or HF_TOKEN)"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFound(
            f"{name.repo} has no revision {name.revision or 'main'!r} (branch, tag or commit)"
        ) from None
    except errors.LocalEntryNotFoundError as e:
        offline = isinstance(e.__cause__, errors.OfflineModeIsEnabled) or _is_offline()
        why = "HF_HUB_OFFLINE is set" if offline else "the Hub cannot be reached"
        raise ModelNotFound(
            f"{name} is not (completely) in the Hub's cache, and {why}: "
            f"{'unset it once' if offline else 'check the network'}, or give a local folder or GGUF file"
        ) from e
    except errors.HFValidationError as e:
        raise ModelNotFound(f"{name} is no Hub name: {str(e).splitlines()[0]}") from None
    except Exception as e:
        # requests in older versions of the Hub's library, httpx in newer ones: their errors have no common base.
        first = (str(e).strip().splitlines() or [""])[0]
        raise ModelNotFound(f"cannot fetch {name}: {type(e).__name__}: {first}") from e


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def _bars(progress: bool) -> Iterator[None]:
    from huggingface_hub import utils

    # The three functions are documented, but not marked as exported.
    if progress or utils.are_progress_bars_disabled():  # type: ignore[attr-defined]
        yield
        return
    utils.disable_progress_bars()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.enable_progress_bars()  # type: ignore[attr-defined]
