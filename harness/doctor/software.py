"""Versions, torch's build, and the tree that runs are recorded with."""

from collections.abc import Callable, Mapping

from harness.doctor import Diagnosis, bad, ok, warn

PACKAGES = ("torch", "numpy", "pandas", "transformers", "diffusers", "ray")
NEEDED = ("torch", "numpy", "pandas")


def versions(python: str, version: Callable[[str], str | None]) -> Diagnosis:
    found = {name: version(name) for name in PACKAGES}
    text = ", ".join([f"python {python}", *(f"{name} {v}" for name, v in found.items() if v is not None)])
    missing = [name for name in NEEDED if found[name] is None]
    if missing:
        todo = f"install {' and '.join(missing)} (`make setup`)"
        return bad("versions", f"{text}; without {', '.join(missing)}", todo, prevents_runs=True)
    return ok("versions", text)


def torch_build(config: str | None, error: str = "") -> Diagnosis:
    """`config` is what torch.__config__.show() says; None if torch could not be imported, and why."""
    if config is None:
        return bad("torch", f"cannot be imported: {error}", "reinstall it (`make setup`)", prevents_runs=True)
    features = {
        "MKL": "USE_MKL=ON" in config or "Math Kernel Library" in config,
        "oneDNN": "USE_MKLDNN=ON" in config or "MKL-DNN" in config,
        "OpenMP": "USE_OPENMP=ON" in config or "OpenMP" in config,
    }
    has = ", ".join(name for name, there in features.items() if there) or "none of MKL, oneDNN, OpenMP"
    if not features["OpenMP"]:
        return warn("torch", f"built with {has}", "use a build with OpenMP: this one runs on one core")
    if not (features["MKL"] or features["oneDNN"]):
        return warn("torch", f"built with {has}", "use a build with MKL or oneDNN: its products are faster")
    return ok("torch", f"built with {has}")


def tree(commit: str | None, dirty: bool | None) -> Diagnosis:
    if commit is None:
        return warn("git", "no commit here", "run inside a git tree: a result without a commit cannot be repeated")
    if dirty:
        return warn("git", f"{commit[:12]} with changes", "commit first: a result should name what was run")
    return ok("git", f"{commit[:12]}, clean")


def threads(number: int, usable: int, environment: Mapping[str, str]) -> Diagnosis:
    """`usable` cores: what affinity and quota leave."""
    names = sorted(name for name in environment if name.startswith(("OMP_", "MKL_", "GOMP_", "KMP_")))
    shown = "".join(f", {name}={environment[name]}" for name in names)
    text = f"{number} of torch for {usable} usable cores{shown}"
    if number > usable:
        return bad("threads", text, f"set OMP_NUM_THREADS={usable}: threads that wait for a core make noise")
    dynamic = [name for name in ("OMP_DYNAMIC", "MKL_DYNAMIC") if environment.get(name, "").lower() in ("true", "1")]
    if dynamic:
        return warn("threads", text, f"unset {dynamic[0]}: the number of threads may change within a run")
    if number < usable:
        return warn("threads", text, f"set OMP_NUM_THREADS={usable}, unless fewer are meant")
    return ok("threads", text)
