"""Runs one after another, or several at a time in processes of their own; those with a row are not repeated."""

import hashlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from recipes import files
from recipes.errors import RecipeError
from recipes.study import records
from recipes.study.run import Run
from recipes.study.training import Row, Training, data_of


@dataclass(frozen=True)
class Place:
    """Where runs read and write, and compute.

    Attributes:
        csv: file of the rows.
        data_dir: folder that holds the data set.
        device: torch device.
        stop_at: time (`time.time`) after which nothing is begun; runs that it interrupts leave a checkpoint. None to
            run to the end.
    """

    csv: Path
    data_dir: str
    device: str = "auto"
    stop_at: float | None = None

    def checkpoint(self, run: Run) -> Path:
        """The file of a run that was interrupted."""
        digest = hashlib.sha256(" ".join(run.key).encode()).hexdigest()[:16]
        return self.csv.with_suffix(".checkpoints") / f"{digest}.pt"


def train_all(runs: Sequence[Run], place: Place, jobs: int) -> list[str]:
    """Trains the runs that have no row yet.

    Args:
        runs: in their order; the same one may be there twice.
        place: where to.
        jobs: processes with one thread each; with one it is this process.

    Returns:
        A line for each run that failed, and for each that another process is training now.

    Raises:
        RecipeError: settings are not possible, or the images cannot be read.
    """
    wanted = list(dict.fromkeys(runs))
    for run in wanted:
        run.settings(place.data_dir, place.device)
    done = records.read(place.csv)
    pending = [run for run in wanted if run.key not in done]
    problems = []
    with tqdm(total=len(wanted), initial=len(wanted) - len(pending), desc="runs", unit="run", disable=None) as bar:
        for run, problem in _results(pending, place, jobs):
            bar.set_postfix_str(run.words)
            bar.update()
            if problem:
                problems.append(f"{run.words}: {problem}")
                tqdm.write(problems[-1])
    return problems


def train_one(run: Run, place: Place) -> str:
    """Trains a run and adds its row, unless it has one.

    Args:
        run: to be trained.
        place: where to.

    Returns:
        Why there is no row; empty where there is one.

    Raises:
        RecipeError: the images cannot be read.
    """
    with records.claimed(place.csv, run) as is_mine:
        if not is_mine:
            return "another process trains it now"
        if run.key in records.read(place.csv):
            return ""
        data_of(run, place.data_dir)  # without the images no run can be trained
        try:
            row = _train(run, place)
        except RecipeError as error:
            return str(error)
        if row is None:
            return "out of time; the same command goes on"
        records.add(place.csv, row)
        place.checkpoint(run).unlink(missing_ok=True)
    return ""


def _train(run: Run, place: Place) -> Row | None:
    """The row of a run that goes on from its checkpoint, if it has one; None where there is no time left.

    An epoch is begun if the one before it would have ended in time, and half as much again is left.
    """
    if place.stop_at is not None and time.time() > place.stop_at:
        return None
    training, path = Training(run, place.data_dir, place.device), place.checkpoint(run)
    if path.exists():
        try:
            training.load_state_dict(files.read_checkpoint(path))
        except Exception as error:  # what a damaged file holds can raise nearly anything
            raise RecipeError(f"{path} cannot be gone on from ({error}); delete it, and the run begins anew") from error
    while not training.is_done:
        start = time.time()
        training.train_epoch()
        if place.stop_at is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_checkpoint(path, training.state_dict())
        if time.time() + 1.5 * (time.time() - start) > place.stop_at:
            return None
    return training.row()


def _results(runs: Sequence[Run], place: Place, jobs: int) -> Iterator[tuple[Run, str]]:
    """Each run with what `train_one` returns for it, as it ends."""
    if jobs == 1:
        for run in runs:
            yield run, train_one(run, place)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = {pool.submit(train_one, run, place): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
