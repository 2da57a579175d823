"""The suite in new environments, of the oldest and the newest versions that are supported: `make test-versions`.

`python -m nox -s "suite(torch='2.15.0')" -- tests/policy/test_attach.py` runs a part with one version.
"""

from pathlib import Path

import nox

#: The oldest torch that is supported, that of `constraints.txt`, and the newest; all else is as `constraints.txt` says,
#: but for NumPy beside the oldest: the interpreter of its Triton does not take a newer one.
VERSIONS = ("2.11.0", "2.13.0", "2.15.0")
OTHERS = {"2.11.0": ["numpy==2.3.5"]}
nox.options.default_venv_backend = "venv"


@nox.session
@nox.parametrize("torch", VERSIONS)
def suite(session: nox.Session, torch: str) -> None:
    """Install brevact and its tests with a version of torch from the registry, and run them."""
    pins = Path("constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    others = OTHERS.get(torch, [])
    free = {"torch", "triton", *(pin.partition("==")[0] for pin in others)}
    constraints.write_text("\n".join([*(pin for pin in pins if pin.partition("==")[0] not in free), *others]))
    session.install("-q", "-c", str(constraints), f"torch=={torch}", "-e", ".[test,recipes]")
    session.install("-q", "--no-deps", "-c", "constraints.txt", "timm", "torchvision")  # which ask for one torch
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *session.posargs)
