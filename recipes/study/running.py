"""Runs one after another, or several at a time in processes of their own; those with a row are not repeated."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from recipes.errors import RecipeError
from recipes.study import records
from recipes.study.run import Run
from recipes.study.training import data_of, train_run


@dataclass(frozen=True)
class Place:
    """Where runs read and write, and compute.

    Attributes:
        csv: file of the rows.
        data_dir: folder that holds the data set.
        device: torch device.
    """

    csv: Path
    data_dir: str
    device: str = "auto"


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
            records.add(place.csv, train_run(run, place.data_dir, place.device))
        except RecipeError as error:
            return str(error)
    return ""


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
