"""Which requests take part in a step, and what it yields: continuous batching, chunked prefill, preemption.

Pure: no clock, no I/O. A step has a token budget (`max_num_batched_tokens`); decoding requests take one token each,
then prompts take what is left, in chunks (beside others no more than `long_prefill_token_threshold` of one). A prompt's
last chunk yields the first token. When the KV cache overflows,
the request that came last is put back to the head of the queue and starts again, as in vLLM V1.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Request:
    """One request inside the engine; `computed` counts the tokens whose keys and values are in the cache."""

    id: int
    prompt_tokens: int
    max_tokens: int
    natural_stop: bool = False  # ends with "stop" instead of "length"
    computed: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """What one request got in a step: one token; `finished` is its reason or an empty string."""

    id: int
    finished: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step did, in tokens: `queried` of prompts admitted, `prefill` computed, `prompt` of prompts that ended."""

    outputs: tuple[Output, ...]
    queried_tokens: int
    prompt_tokens: int
    prefill_tokens: int
    preempted: int
    running: int
    waiting: int
    kv_share: float


@dataclass(slots=True)
class Scheduler:
    """The queues of one engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_tokens: int
    long_prefill_tokens: int = 0  # of one prompt in a step that others take part in; 0: as many as fit
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request_id: int) -> None:
        """Forgets a request; an unknown one is no error (it may just have ended)."""
        self.running = [each for each in self.running if each.id != request_id]
        self.waiting = deque(each for each in self.waiting if each.id != request_id)

    def clear(self) -> None:
        self.running.clear()
        self.waiting.clear()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def cached_tokens(self) -> int:
        """Computed for requests that have not ended."""
        return sum(each.computed for each in self.running)

    @property
    def kv_share(self) -> float:
        """The used share of the KV cache, 0 to 1."""
        return min(1.0, self._blocks() / self._total)

    @property
    def _total(self) -> int:
        return max(1, self.kv_tokens // self.block_size)

    def _blocks(self) -> int:
        return sum(-(-each.computed // self.block_size) for each in self.running)

    def _admit(self) -> int:
        queried = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            need = -(-self.waiting[0].prompt_tokens // self.block_size)
            if self.running and self._blocks() + need > self._total:
                break
            self.running.append(self.waiting.popleft())
            queried += self.running[-1].prompt_tokens
        return queried

    def step(self) -> Step:
        """Advances every scheduled request by what the budget allows."""
        queried = self._admit()
        shared = len(self.running) + len(self.waiting) > 1
        most = self.long_prefill_tokens if shared and self.long_prefill_tokens else self.max_num_batched_tokens
        budget, prompt, prefill, outputs = self.max_num_batched_tokens, 0, 0, []
        for each in sorted(self.running, key=lambda one: one.generated == 0):  # decodes before prefills
            left = each.prompt_tokens - each.computed
            took = min(budget, max(1, left), most)
            if took == 0:
                break
            budget -= took
            each.computed += took
            prefill += took if left > 0 else 0
            if each.computed < each.prompt_tokens:
                continue
            prompt += each.prompt_tokens if left > 0 else 0
            each.generated += 1
            outputs.append(Output(each.id, self._end(each)))
        done = {output.id for output in outputs if output.finished}
        self.running = [each for each in self.running if each.id not in done]
        preempted = self._preempt()
        running, waiting = len(self.running), len(self.waiting)
        return Step(tuple(outputs), queried, prompt, prefill, preempted, running, waiting, self.kv_share)

    def _end(self, request: Request) -> str:
        if request.generated < request.max_tokens:
            return ""
        return "stop" if request.natural_stop else "length"

    def _preempt(self) -> int:
        count = 0
        while len(self.running) > 1 and self._blocks() > self._total:
            victim = self.running.pop()
            # What it has said already becomes part of its prompt: recomputed, not said twice.
            victim.prompt_tokens, victim.computed = victim.prompt_tokens + victim.generated, 0
            victim.max_tokens, victim.generated = victim.max_tokens - victim.generated, 0
            self.waiting.appendleft(victim)
            count += 1
        return count
