"""Real text as training data: the standard library's Python files, or any file or folder."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

MOST_BYTES = 4_000_000


def load_text(path: Path | None) -> torch.Tensor:
    """Up to four million bytes of text as uint8 `(bytes,)`.

    Args:
        path: A file, or a folder read recursively in the order of its names. None takes the `.py`
            files of the running interpreter's standard library.

    Raises:
        ValueError: If there is nothing to read at `path`.
    """
    text = bytearray()
    for file in _files(path):
        text += file.read_bytes()
        if len(text) >= MOST_BYTES:
            break
    if not text:
        raise ValueError(f"--data {path} holds no text: name a file or a folder with files")
    return torch.frombuffer(text[:MOST_BYTES], dtype=torch.uint8)


def _files(path: Path | None) -> Iterator[Path]:
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        return iter(sorted(folder.glob("*.py")))
    if path.is_file():
        return iter([path])
    return iter(sorted(file for file in path.rglob("*") if file.is_file()))


def sample(
    text: torch.Tensor, *, seed: int, step: int, batch: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of step `step`: bytes and the bytes after them, int64 `(batch, context)` each.

    Raises:
        ValueError: If the text is not longer than the context.
    """
    if len(text) <= context + 1:
        raise ValueError(f"the text has {len(text)} bytes: give more than {context + 1}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
