"""For every test: none may fail because the machine is busy, or because of an earlier test."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from firn import backends
from firn.backends import cpu
from firn.backends.cpu import rope, softmax
from firn.backends.cpu.blas import Blas
from firn.backends.recurrence.replaced import Recurrences
from tests import one_blas
from tests.backends.fakes import FAKES, is_on_a_virtual_gpu

settings.register_profile("firn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("firn")

HEAVY = (
    "ranks/test_text.py", "models/speculation/test_speculation.py", "sweep/test_sweep.py",
    "models/vision/test_reuse.py", "models/decode/test_batching.py", "stories/test_oracle.py",
    "contracts/test_dialects.py", "cache/test_cache_exact.py", "stories/test_ssd_processes.py",
    "text/prompt/test_growing_chats.py", "traces/test_simulate.py", "cache/test_cache_faults.py",
    "cli/talk/test_chat.py", "models/decode/test_backlog.py", "stories/test_sparse_server.py",
    "contracts/test_codecs.py", "stories/test_stores.py", "models/vision/test_mixed_batches.py",
    "stories/test_ssd_faults_oracle.py", "cache/test_cache_requests.py", "cache/test_ssd_story.py",
    "cli/test_commands.py", "cli/doctor/test_examine.py", "fleet/test_front.py",
    "backends/cpu/test_cpu_functions.py", "cli/bench/test_bench.py", "models/load/test_hub.py",
    "models/vision/test_loading.py", "models/speculation/drafters/test_mtp.py",
    "host/test_shutdown.py", "models/vision/test_against_mlx_vlm.py", "models/vision/test_disk.py",
    "models/vision/test_guesses.py",
)  # fmt: skip
"""The slowest files, which run first: a worker that began one last would make the others wait."""

BITS = (
    "backends/recurrence/", "cache/test_cache_exact.py", "models/decode/test_batching.py",
    "models/decode/test_early_dispatch.py", "models/decode/test_kv_growth.py",
    "models/decode/test_rewind.py", "models/speculation/drafters/test_mtp.py",
    "models/test_embedder.py", "models/vision/test_against_mlx_vlm.py",
    "models/vision/test_mixed_batches.py", "models/vision/test_prompts_with_pictures.py",
    "models/vision/test_reuse.py", "ranks/test_text.py", "sparse/test_attention.py",
    "sparse/test_models.py", "sparse/test_placing.py", "stories/test_end_to_end_models.py",
    "zoo/test_zoo.py",
)  # fmt: skip
"""Files that compare what a device computes in two ways, to the bit or to 1e-4. The GPU of a virtual
Mac is not held to that."""

# Otherwise newer Apple GPUs and NVIDIA GPUs multiply float32 with 10 bits of its mantissa, and
# tests compare logits of batched and single rows. MLX reads this at its first matrix product.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# Encoding one text needs no tokenizer threads: waking and stopping them is a tenth of its work.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The other cores belong to other workers: BLAS threads would spin waiting for each other, for
# longer than the products take. This holds for servers that tests start, too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"

# MLX hands each operation to its own thread, and Linux would let that thread preempt the one that
# is about to hand over the next: half of a tiny model's step is switching between the two. In a
# batch job, a thread that wakes up waits for a free core instead. Servers that tests start inherit
# it. macOS has nothing like it, and a container may forbid it.
with contextlib.suppress(AttributeError, OSError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# A shell that runs the tests in the background, or nohup, makes them ignore these signals, and so
# would every server and chat that a test wants to interrupt.
for _signal in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, signal.SIG_DFL)


def _few_certificates() -> str:
    """A file with one certificate. Every HTTP client reads all certificates before its first
    request, which takes longer than most tests' requests, and none of those leaves this machine."""
    first = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    path = Path(tempfile.gettempdir()) / f"firn-tests-{os.getuid()}" / "certificate.pem"
    path.parent.mkdir(exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text("".join(first[:2]) + "\n")
    own.replace(path)
    return str(path)


os.environ["SSL_CERT_FILE"] = _few_certificates()

# firn warns of a FIRN_ variable that it does not know; processes of the tests read another one.
if _device := os.environ.pop("FIRN_TEST_DEVICE", ""):
    os.environ["TESTS_DEVICE"] = _device

_startup = str(Path(__file__).with_name("startup"))
if _startup not in (_paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([_startup, *filter(None, _paths)])


@pytest.fixture(autouse=True, scope="session")
def _one_mlx_for_all() -> Iterator[Blas]:
    """What a server replaces in MLX is replaced for its whole process; this one has many servers.

    So all tests of a process share a fast BLAS, and none of them installs our functions in MLX.
    """
    blas = one_blas.find()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "attach", lambda choice, **more: blas)
        patch.setattr(softmax, "install_if_faster", lambda patches: False)
        patch.setattr(rope, "install", lambda patches: None)
        patch.setattr(Recurrences, "_replace", lambda self: None)
        if device := os.environ.get("TESTS_DEVICE"):
            patch.setattr(backends, "find", FAKES[device])
        yield blas


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}": i for i, name in enumerate(HEAVY)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(HEAVY)))
    exact = tuple(f"tests/{name}" for name in BITS)
    skip = pytest.mark.skip(reason="a virtual machine's GPU computes other bits")
    for item in items:
        if item.nodeid.startswith(exact):
            item.add_marker(pytest.mark.bits)
            if is_on_a_virtual_gpu():
                item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing imported now is ever freed, and looking for garbage takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Thousands of tests and a million library objects stay: no collection should look at them."""
    gc.collect()
    gc.freeze()
