"""A few replies before the first request, so that MLX has compiled what requests will need.

On a GPU, MLX compiles a kernel, or makes a pipeline of it, when it is first used. For some kernels of
CUDA that takes seconds, while all running requests wait: the first time that a row joins others, that
drafts are tried, that a request asks for top-p or logprobs. MLX keeps them on disk, so only the first
warm-up on a machine takes long. It also keeps that time out of what is measured to choose drafts and
chunks by.

Owner: the engine thread, before it serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from firn.core.values import Job, Prompt, RequestId, Sampling
from firn.models.decode.batch import Group, Row
from firn.models.decode.runner import Runner
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.steps import Speculator
from firn.models.faults import first_line
from firn.models.speculation.drafters import Draft, Drafter
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.gate import Unlimited
from firn.models.speculation.mtp import MtpModel
from firn.models.speculation.speculator import DraftPlan, Speculation

log = logging.getLogger("firn.models")

N_PROMPT = 24
N_CHOICES = 2
N_PLAIN, N_WIDE = 3, 10
"""Steps without and with drafts. The first few of a shape are built, then it is traced, and only then
can steps be dispatched before the previous one is read."""
WIDTH = 4
LONG_S = 5.0
"""A warm-up that takes longer has compiled something."""
REPLIES: tuple[tuple[Sampling, int | None], ...] = (
    (Sampling(temperature=0.0), None),
    (Sampling(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=1), 3),
    (
        Sampling(
            temperature=0.7,
            top_p=0.9,
            seed=1,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            logit_bias=((1, 1.0),),
        ),
        0,
    ),
)
"""How each reply is sampled, and how many alternatives its logprobs have."""


class ConstantDrafter(Drafter):
    """A drafter that always drafts the same token."""

    is_free = True

    def odds(self, kind: int) -> float:
        return 0.5

    def prepare(self, row: Hashable) -> bool:
        return True

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        return [Draft((1,) * n_most, (0,) * n_most) for _ in rows]


class WarmUpSpeculation(Speculation):
    """Tries drafts of the `width` that it is given, whatever they cost."""

    def __init__(self, model: Any, *, in_groups: bool, profile: StepProfile) -> None:
        drafter = MtpDrafter(model) if isinstance(model, MtpModel) else ConstantDrafter()
        super().__init__(drafter, in_groups=in_groups, profile=profile, allowance=Unlimited)
        self.width = 1

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        asks = () if self._costly is None or self.width == 1 else tuple(group.rows)
        return DraftPlan(self.width, asks)


def warm_up_speculator(model: Any, speculator: Speculator) -> Speculator:
    """Drafts on the same terms as the server's own speculation, if it drafts."""
    if not speculator.drafts:
        return speculator
    return WarmUpSpeculation(model, in_groups=speculator.in_groups, profile=speculator.profile)


def warm_up(runner: Runner) -> None:
    """Use the runner, which serves nobody, as requests will. A fault here is only logged: a request
    that meets it again will fail with it."""
    began = time.perf_counter()
    try:
        for sampling, top_logprobs in REPLIES:
            _reply(runner, sampling, top_logprobs)
        runner.free_memory()
    except Exception as e:  # any model code runs here
        log.warning("warming up before the first request failed: %s", first_line(e), exc_info=e)
    took_s = time.perf_counter() - began
    if took_s > LONG_S:
        log.info("GPU kernels compiled in %.0f s; later starts reuse them", took_s)


def _reply(runner: Runner, sampling: Sampling, top_logprobs: int | None) -> None:
    """Read two prompts, decode several choices of each, and let the rows leave in turn."""
    n_reply = 2 * (N_PLAIN + N_WIDE) * WIDTH
    ids = [1 + i % 16 for i in range(N_PROMPT)]
    prompts = [Prompt(np.array(ids[:n])) for n in (N_PROMPT, N_PROMPT - 3)]
    jobs = [
        Job(RequestId(f"warm-up-{i}"), prompt, n_reply, sampling, top_logprobs=top_logprobs)
        for i, prompt in enumerate(prompts)
    ]
    rows = [
        row
        for job, read in zip(jobs, _read(runner, prompts), strict=True)
        for row in runner.choices(read, job, range(N_CHOICES))
    ]
    for i, row in enumerate(rows):
        runner.join(row, int(jobs[i // N_CHOICES].prompt.ids[-1]))
    _decode(runner, width=1, n_steps=N_PLAIN)
    _decode(runner, width=WIDTH, n_steps=N_WIDE)
    runner.leave(rows[-1:])
    _decode(runner, width=1, n_steps=N_PLAIN)
    runner.leave(rows[1:])
    _decode(runner, width=WIDTH, n_steps=N_WIDE)
    _decode(runner, width=1, n_steps=N_PLAIN)
    runner.leave(rows)


def _read(runner: Runner, prompts: Sequence[Prompt]) -> list[Row]:
    """A row for each prompt, with all but the last token read: the first half alone, the rest
    together if possible."""
    rows = [runner.start(None) for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        runner.prefill(row, prompt, len(prompt) // 2)
    ends = [len(prompt) - 1 for prompt in prompts]
    if runner.can_batch_prefill:
        runner.batched_prefill(rows, prompts, ends)
    else:
        for row, prompt, end in zip(rows, prompts, ends, strict=True):
            runner.prefill(row, prompt, end)
    for row in rows:
        runner.finish_chunk(row)
    return rows


def _decode(runner: Runner, *, width: int, n_steps: int) -> None:
    speculator = runner.speculator
    if isinstance(speculator, WarmUpSpeculation):
        speculator.width = width
    elif width > 1:
        return
    for _ in range(n_steps):
        for rows in runner.groups():
            runner.launch(rows)
        for rows in runner.groups():
            runner.collect(rows, keep_in_flight=1)
    for rows in runner.groups():
        runner.collect(rows, keep_in_flight=0)
