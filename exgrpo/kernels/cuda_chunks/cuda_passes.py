"""The passes of a chunk whose rows are read once: sums, objective and F by one kernel, csrc/cuda/rows_kernel.cuh."""

from functools import cache

import torch
from torch import Tensor

from exgrpo.kernels.chunks.head import Chunk, ChunkedHead
from exgrpo.kernels.chunks.softmax import Factors, PolicyRows, RowTerms, Statistics, Sums
from exgrpo.kernels.cuda_chunks.binding import Call, Output, RowsArguments, load
from exgrpo.kernels.inputs import PolicyTokens
from exgrpo.kernels.triton_chunks.launch import Plan
from exgrpo.kernels.triton_chunks.triton_passes import TritonPasses
from exgrpo.kernels.triton_chunks.triton_tokens import ratio_numbers


class CudaPasses(TritonPasses):
    """F with the first reading of the raw products, whatever the head.

    Where F needs the row's coefficient, for an entropy's gradient or a cap's slope, the kernel is launched by `policy`,
    and `sums` only says where it will leave the sums. Shards of a vocabulary, float64 and rows too long for any cluster
    are left to the Triton kernels, as is the backward of log-probabilities, which reads once and writes once anyway.
    """

    def __init__(self, head: ChunkedHead, chosen: Plan) -> None:
        super().__init__(head, chosen)
        self._held = not head.shard.group_name and head.dtype == torch.float32 and _fits(head.shard.size)
        self._deferred: Call | None = None
        self._formed: Tensor | None = None

    def sums(self, chunk: Chunk, *, gradient_follows: bool, with_entropy: bool = False) -> Sums:
        """See `Passes`."""
        self._deferred = self._formed = None
        if not self._held:
            return super().sums(chunk, gradient_follows=gradient_follows, with_entropy=with_entropy)
        logits = self._products(chunk)
        sums = Sums(*logits.new_empty(4, len(logits)))
        output = Output.NOTHING
        if gradient_follows:
            output = Output.GRADIENT if with_entropy or self.softcap is not None else Output.EXPONENTIALS
            bfloat16 = self.head.products.mixed and self.head.options.operand == torch.bfloat16
            # The kernel holds a row before it writes it: F takes the memory of the logits in either dtype.
            self._formed = logits.view(torch.bfloat16)[:, : logits.shape[1]] if bfloat16 else logits
        call = rows_call(logits, self.bias, chunk.target.local(), chunk.temperature, self.softcap, sums)
        if self._formed is not None:
            set_output(call, output, self._formed)
        if output == Output.GRADIENT:
            self._deferred = call
        else:
            call.launch(logits.device)
        return sums

    def policy(self, sums: Sums, chunk: Chunk, tokens: PolicyTokens, terms: RowTerms) -> PolicyRows:
        """See `Passes`."""
        if self._deferred is None:
            return super().policy(sums, chunk, tokens, terms)
        rows = PolicyRows(*sums.gap.new_empty(len(PolicyRows._fields), sums.gap.numel()))
        set_policy(self._deferred, tokens, terms, rows)
        self._deferred.launch(sums.gap.device)
        self._deferred = None
        return rows

    def recall(self, chunk: Chunk, statistics: Statistics) -> None:
        """See `Passes`."""
        self._deferred = self._formed = None
        super().recall(chunk, statistics)

    def gradient(self, chunk: Chunk, statistics: Statistics, factors: Factors) -> Tensor:
        """See `Passes`."""
        return super().gradient(chunk, statistics, factors) if self._formed is None else self._formed


def rows_call(
    logits: Tensor, bias: Tensor | None, target: Tensor, temperature: Tensor | None, softcap: float | None, sums: Sums
) -> Call:
    """The row kernel's call that finds ``sums``, contiguous, and writes nothing.

    Args:
        logits: [rows, V] fp32, raw products, unit stride along V.
        bias: [V], any float dtype.
        target: [rows] int64.
        temperature: [rows] fp32.
        softcap: see `inputs.HeadOptions`, as bias and temperature.
        sums: results.
    """
    call = Call("exgrpo_rows", RowsArguments(rows=logits.shape[0], vocabulary=logits.shape[1], output=Output.NOTHING))
    call.set(
        logits=logits,
        stride=logits.stride(0),
        bias=None if bias is None else bias.float().contiguous(),
        target=target,
        temperature=None if temperature is None else temperature.contiguous(),
        softcap=softcap or 0.0,
        **sums._asdict(),
    )
    return call


def set_output(call: Call, output: Output, out: Tensor) -> None:
    """Has a call write F to ``out`` [rows, V], fp32 or bf16, which may be its logits."""
    call.set(output=output, out=out, out_stride=out.stride(0), out_is_bfloat16=out.dtype == torch.bfloat16)


def set_policy(call: Call, tokens: PolicyTokens, terms: RowTerms, rows: PolicyRows) -> None:
    """Has a call evaluate the objective of its rows; ``rows`` are fp32 results, one behind the other in memory."""
    low, high, log_beta = ratio_numbers(terms.surrogate)
    call.set(
        old_log_prob=tokens.old_log_prob.float().contiguous(),
        advantage=tokens.advantage.float().contiguous(),
        replayed=None if tokens.replayed is None else tokens.replayed.contiguous(),
        normalizer=terms.normalizer.double(),
        has_clip=terms.surrogate.clip is not None,
        has_beta=terms.surrogate.beta is not None,
        clip_low=low,
        clip_high=high,
        log_beta=log_beta,
        entropy_coef=terms.entropy_coef,
        results=rows.value,
    )


@cache
def _fits(vocabulary: int) -> bool:
    """Whether some cluster holds a row."""
    return vocabulary > 0 and bool(load().exgrpo_rows_plan(vocabulary).cluster)
