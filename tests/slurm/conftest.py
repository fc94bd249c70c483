"""One cluster a session. Without Slurm, root or network namespaces the tests skip and say so."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, ClusterError, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = missing()
    if reason is not None:
        pytest.skip(f"no Slurm cluster here: {reason}; `make test-slurm` installs what is missing")
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        try:
            found.start()
        except ClusterError as error:
            pytest.skip(f"no Slurm cluster here: {error}")
        yield found
    finally:
        found.stop()
