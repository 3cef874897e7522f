"""How state lies on disk: one checkpoint of torch.distributed.checkpoint (DCP), a file per rank.

    <path>/.metadata                       what there is and where; DCP reads it first
    <path>/data-<save>/<rank>/__0_0.distcp a rank's part

Each rank writes its part by itself, as if it were alone. Then one puts their metadata together and
moves it into place, in one atomic step: before it a reader finds the checkpoint that was there, or
none, after it the new one. Data of the old one is deleted last. Nothing here knows what state
means, or waits for another rank; everything blocks, on files.

DCP's own `save` would need a default process group, which a program may want to make itself, and
ranks that wait there for one that has died wait for that group's timeout, half an hour.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from rrfp_async.checkpoint.part import kind_of, tensor_kind
from rrfp_async.errors import CheckpointError

_METADATA = ".metadata"
_DATA = "data-"


def check_target(path: Path) -> None:
    """Refuse a place that holds something else than a checkpoint.

    Raises:
        ValueError: If there is a file, or a folder with other things in it.
    """
    if path.is_dir() and not (path / _METADATA).exists() and any(path.iterdir()):
        raise ValueError(f"{path} is a folder that holds no checkpoint: give another or empty one")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: give the path of a folder, which may be a new one")


class Saving:
    """One save, as one rank writes it.

    Args:
        path: The checkpoint's folder, equal on every rank.
        save_id: Names this save, by a name that no other has; equal on every rank.
        rank: Who writes.
    """

    def __init__(self, path: Path, save_id: str, rank: int) -> None:
        self._path = path
        self._data = path / f"{_DATA}{save_id}"
        self._rank = rank
        self._published = False

    def write(self, state: Mapping[str, Any]) -> None:
        """Write this rank's flat state.

        Raises:
            CheckpointError: If it cannot be written.
        """
        try:
            writer = FileSystemWriter(self._data / str(self._rank))
            planner = DefaultSavePlanner(flatten_state_dict=False)
            planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=True)
            writer.set_up_storage_writer(True)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            plans, metadata = planner.create_global_plan([plan])
            plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
            writer.finish(metadata, [writer.write_data(plan, planner).wait()])
        except (OSError, RuntimeError) as error:  # the latter from torch.save on a full disk
            raise CheckpointError(
                f"rank {self._rank} cannot write the checkpoint {self._path} "
                f"({type(error).__name__}: {error}): give a path that every rank can write to"
            ) from error

    def publish(self, ranks: int) -> None:
        """Make what `ranks` ranks have written the checkpoint. One rank does, when all have.

        Raises:
            CheckpointError: If it cannot be done; an older checkpoint still is the one.
        """
        try:
            FileSystemWriter(self._data).finish(*self._put_together(ranks))
            os.replace(self._data / _METADATA, self._path / _METADATA)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {self._path} cannot be put together ({type(error).__name__}: "
                f"{error}): give a path on a file system that every rank sees"
            ) from error
        self._published = True
        for data in self._path.glob(f"{_DATA}*"):  # an older checkpoint's, or a killed save's
            if data != self._data:
                shutil.rmtree(data, ignore_errors=True)

    def discard(self) -> None:
        """Remove what all ranks have written, unless it is published. The rank that publishes may.

        What a rank still writes meanwhile may stay; the next save to this path removes it.
        """
        if not self._published:
            shutil.rmtree(self._data, ignore_errors=True)
            with suppress(OSError):  # an older checkpoint is there
                self._path.rmdir()

    def _put_together(self, ranks: int) -> tuple[Metadata, list[list[WriteResult]]]:
        """The metadata of all ranks' parts as that of one checkpoint."""
        whole = Metadata({})
        found = []
        for rank in range(ranks):
            own = FileSystemReader(self._data / str(rank)).read_metadata()
            whole.state_dict_metadata |= own.state_dict_metadata
            for index, info in own.storage_data.items():
                where = f"{self._data.name}/{rank}/{info.relative_path}"
                found.append(WriteResult(index, info.length, replace(info, relative_path=where)))
        # Where a key's value goes in the nested dict that `dcp_to_torch_save` makes.
        whole.planner_data = {key: tuple(key.split(".", 1)) for key in whole.state_dict_metadata}
        return whole, [found]


class _Planner(DefaultLoadPlanner):
    """Unpickles nothing but tensors and plain values."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class Reading:
    """A checkpoint that is there.

    Attributes:
        kinds: What it holds: each key of its flat state and the value's kind, see `kind_of`.

    Raises:
        ValueError: If there is none at `path`.
        CheckpointError: If it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"{path} holds no checkpoint (no {_METADATA} in it): give the path of save()"
            ) from None
        except Exception as error:  # a pickle that is cut or of another version raises anything
            raise self._unreadable(error) from error
        self.kinds = {
            key: tensor_kind(entry.size, entry.properties.dtype)
            if isinstance(entry, TensorStorageMetadata)
            else kind_of(None)
            for key, entry in self._metadata.state_dict_metadata.items()
        }

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of `keys`, tensors on the CPU.

        Raises:
            CheckpointError: If they cannot be read.
        """
        state = {key: self._empty(key) for key in keys}
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            planner.set_up_planner(state, self._metadata, is_coordinator=True)
            self._reader.set_up_storage_reader(self._metadata, True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            plan = self._reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except Exception as error:  # a file that is gone, cut or damaged raises anything
            raise self._unreadable(error) from error
        return state

    def _empty(self, key: str) -> torch.Tensor | None:
        entry = self._metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return None

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._path} cannot be read ({type(error).__name__}: {error}): load "
            f"another one"
        )
