"""One headless Chromium for the tests of this folder; without one they are skipped."""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Chromium, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium on PATH; `make test-browser` installs it")
    browser = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
