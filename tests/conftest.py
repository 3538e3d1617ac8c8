"""For all tests: no network, one thread per worker, small sizes; set before anything imports torch."""

import contextlib
import gc
import os
import socket

import hypothesis
import nbval.kernel
import pytest

hypothesis.settings.register_profile("labkit", deadline=None)  # how long an example takes depends on what else runs
hypothesis.settings.load_profile("labkit")

pytest_plugins = ["tests.model_fixtures"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("LABKIT_PROFILE", "ci")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; more threads would only get in each other's way
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")


start_kernel = nbval.kernel.start_new_kernel


def start_kernel_or_try_again(*args, **kwargs):
    """Two kernels that start at once may get one port; then one never answers (jupyter_client issue 487)."""
    try:
        return start_kernel(*args, **kwargs)
    except RuntimeError:
        return start_kernel(*args, **kwargs)


nbval.kernel.start_new_kernel = start_kernel_or_try_again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, so that no worker is left alone with one at the end; stable within a file."""
    long = {item.path for item in items if item.path.suffix == ".ipynb" or item.get_closest_marker("end_to_end")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True, scope="module")
def what_is_imported_is_no_garbage() -> None:
    """Out of the collector's sight: a training run collects several times, each time through torch and transformers,
    which took two thirds of the time of a test that trains a tiny model.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_network(monkeypatch) -> list[str]:
    """Only this machine can be reached (loopback, Unix sockets); other attempts raise OSError and are listed."""
    attempts: list[str] = []
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def refuse_outside(host):
        host = host.decode() if isinstance(host, bytes) else str(host)
        if host not in ("localhost", "::1", "None") and not host.startswith("127."):
            attempts.append(host)
            raise OSError(f"the network is blocked in this test, {host} cannot be reached")

    def guarded_connect(self, address):
        if self.family != getattr(socket, "AF_UNIX", None):
            refuse_outside(address[0])
        return connect(self, address)

    def guarded_resolve(host, *args, **kwargs):
        refuse_outside(host)
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_resolve)
    return attempts


@pytest.fixture
def labkit_command(capfd):
    """labkit_command("models", "--json") -> (exit code, standard output, standard error)"""

    def run(*arguments: object) -> tuple[int, str, str]:
        from labkit import cli

        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        return exit_.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def full_disk():
    """`with full_disk(after=1000)`: no file of this process can grow beyond 1000 bytes, whoever writes it."""
    resource = pytest.importorskip("resource")

    @contextlib.contextmanager
    def limited(after: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
