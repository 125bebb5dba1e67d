"""`pytest bench --suite FILE` chooses the cases; configs/smoke.yaml unless given."""

from pathlib import Path

import pytest

from harness.suite.config import Suite, load_suite

SMOKE = Path(__file__).parent.parent / "configs" / "smoke.yaml"
KEY = pytest.StashKey[Suite]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", metavar="FILE", default=str(SMOKE), help="the YAML file whose cases are timed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = chosen(metafunc.config).cases
        metafunc.parametrize("case", cases, ids=[case.case_id for case in cases])


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Suite:
    return chosen(request.config)


def chosen(config: pytest.Config) -> Suite:
    if KEY not in config.stash:
        config.stash[KEY] = load_suite(Path(config.getoption("--suite")))
    return config.stash[KEY]
