"""The suite in new environments, of the oldest and the newest versions that are supported: `make test-versions`.

`python -m nox -s "suite(torch='2.15.0')" -- tests/test_policy.py` runs a part with one version.
"""

from pathlib import Path

import nox

#: torch, and what is not as `constraints.txt` says beside it: at the floor, the floors of the others, too.
VERSIONS = {
    "2.8.0": ("numba==0.61.0", "numpy==2.0.2"),
    "2.13.0": (),
    "2.15.0": (),
}
nox.options.default_venv_backend = "venv"


@nox.session
@nox.parametrize("torch", list(VERSIONS))
def suite(session: nox.Session, torch: str) -> None:
    """Install brevact and its tests with a version of torch from the registry, and run them."""
    chosen = (f"torch=={torch}", *VERSIONS[torch])
    free = {"triton", "llvmlite", *(pin.partition("==")[0] for pin in chosen)}
    pins = Path("constraints.txt").read_text().splitlines()
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in free))
    session.install("-q", "-c", str(constraints), *chosen, "-e", ".[test,recipes]")
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *session.posargs)
