"""The suite in new environments, of the oldest and the newest versions that are supported: `make test-versions`.

`python -m nox -s "suite(torch='2.15.0')" -- tests/policy/test_attach.py` runs a part with one version,
`python -m nox -s installed` installs what is released, `python -m nox -s ahead` tries a torch that is newer.
"""

from pathlib import Path

import nox

#: The oldest torch that is supported, that of `constraints.txt`, and the newest; all else is as `constraints.txt` says,
#: but for NumPy beside the oldest: the interpreter of its Triton does not take a newer one.
VERSIONS = ("2.11.0", "2.13.0", "2.15.0")
OTHERS = {"2.11.0": ["numpy==2.3.5"]}
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["suite"]
#: A step of a program of a user, outside of the checkout.
STEP = """
import torch, brevact
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.SiLU())
brevact.quantize_backward(model)
with brevact.backward_quant(model):
    loss = model(torch.randn(64, 256)).square().mean()
loss.backward()
assert brevact.memory_report(model, torch.randn(64, 256)).ratio > 2, brevact.__file__
"""


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
    _run_suite(session)


@nox.session
@nox.parametrize("torch", ("newest", "nightly"))
def ahead(session: nox.Session, torch: str) -> None:
    """Run the suite with a torch beyond the bounds of pyproject.toml, which pip notes and installs."""
    session.install("-q", "-e", ".[test,recipes]")
    nightly = ("--pre", "--index-url", "https://download.pytorch.org/whl/nightly/cpu")
    session.install("-q", "--upgrade", *(nightly if torch == "nightly" else ()), "torch")
    _run_suite(session)


@nox.session
@nox.parametrize("without", ("nothing", "numba", "triton", "brevitas"))
def installed(session: nox.Session, without: str) -> None:
    """Build sdist and wheel, install one into an empty environment, take a library away, and train a step."""
    folder = Path(session.create_tmp()).resolve()
    session.install("-q", "build")
    session.run("python", "-m", "build", "--outdir", str(folder))
    (package,) = folder.glob("*.tar.gz" if without == "nothing" else "*.whl")
    session.install("-q", "-c", "constraints.txt", str(package))
    if without != "nothing":
        session.run("python", "-m", "pip", "uninstall", "-q", "-y", without)
    session.chdir(folder)
    session.run("python", "-c", STEP)
    if without == "nothing":
        session.run("python", "-m", "brevact", "doctor")


def _run_suite(session: nox.Session) -> None:
    session.install("-q", "--no-deps", "-c", "constraints.txt", "timm", "torchvision")  # which ask for one torch
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *session.posargs)
