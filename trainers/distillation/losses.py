"""Differences between a student's outputs and its teacher's. Pure.

Every loss is a sum over the batch's examples, in fp32, of a mean within the example: it does not depend on
how a global batch is divided. Padding does not count: masks are (B, S), False on padding, None without any.
"""

import math

import torch
from torch.nn import functional

_NOTHING = -1e9  # Logit whose probability is 0. Not infinite: a divergence would multiply that by 0.


def soft_targets(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """`T^2 KL(softmax(t / T) || softmax(s / T))` of (B, C) logits (Hinton et al. 2015, arXiv 1503.02531, 2).

    The square keeps the gradients' size independent of the temperature T.
    """
    return temperature**2 * _divergence(student.float() / temperature, teacher.float() / temperature).sum()


def soft_labels(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """`soft_targets` of independent classes: of each (B, C) logit against a second one that is 0."""
    ours, theirs = student.float() / temperature, teacher.float() / temperature
    cross_entropy = functional.binary_cross_entropy_with_logits(ours, theirs.sigmoid(), reduction="sum")
    entropy = functional.binary_cross_entropy_with_logits(theirs, theirs.sigmoid(), reduction="sum")
    return temperature**2 * (cross_entropy - entropy)


def soft_spans(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """`soft_targets` of a span's first and last token, (B, S, 2) logits, over the real tokens; their mean."""
    first_and_last = (logits.float().transpose(1, 2) / temperature for logits in (student, teacher))
    if mask is not None:
        first_and_last = (logits.masked_fill(~mask[:, None], _NOTHING) for logits in first_and_last)
    return temperature**2 * _divergence(*first_and_last).mean(-1).sum()


def soft_classes_of_tokens(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, labelled: torch.Tensor
) -> torch.Tensor:
    """`soft_targets` of (B, S, C) logits where `labelled` (B, S); the mean over each example's tokens."""
    each = _divergence(student.float() / temperature, teacher.float() / temperature)
    of_examples = each.masked_fill(~labelled, 0.0).sum(1) / labelled.sum(1).clamp(min=1)
    return temperature**2 * of_examples.sum()


def squared_difference(student: torch.Tensor, teacher: torch.Tensor, scale: float) -> torch.Tensor:
    """Half the squared difference of (B, 1) numbers over `scale`: the divergence of normals of that width."""
    return 0.5 * ((student.float() - teacher.float()) / scale).square().sum()


def soft_tokens(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, of_sequence: torch.Tensor
) -> torch.Tensor:
    """`soft_targets` of (M, V) logits, the mean over the `of_sequence` (M,) guesses of each sequence."""
    each = _divergence(student.float() / temperature, teacher.float() / temperature)
    return temperature**2 * (each / of_sequence).sum()


def squared_distance(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean squared difference over tokens and width of (B, S, H) states (arXiv 1909.10351, eq. 8 and 9)."""
    return _mean_of_real((student.float() - teacher.float()).square().mean(-1), mask).sum()


def cosine_distance(student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over tokens of `1 - cos(s, t)` of (B, S, H) states (DistilBERT, arXiv 1910.01108, section 3)."""
    cosine = functional.cosine_similarity(student.float(), teacher.float(), dim=-1)
    return _mean_of_real(1.0 - cosine, mask).sum()


def relations(
    student: torch.Tensor, teacher: torch.Tensor, heads: int, mask: torch.Tensor | None
) -> torch.Tensor:
    """Returns the divergence of how tokens relate to each other by their queries (or keys, or values).

    `R = softmax(A A^T / sqrt(d))` per relation head, where A (S, d) is a slice of width d = H / heads of the
    (B, S, H) states; `KL(R_teacher || R_student)`, the mean over heads and the example's tokens. Widths may
    differ, because R is (S, S) for both. MiniLMv2, arXiv 2012.15828, equations 4 to 6.
    """
    each = _divergence(_related(student, heads, mask), _related(teacher, heads, mask))  # (B, heads, S)
    return _mean_of_real(each.mean(1), mask).sum()


def _related(states: torch.Tensor, heads: int, mask: torch.Tensor | None) -> torch.Tensor:
    """(B, heads, S, S) scaled products of every token with every real one."""
    examples, length, width = states.shape
    split = states.float().view(examples, length, heads, width // heads).transpose(1, 2)
    scores = split @ split.transpose(2, 3) / math.sqrt(width // heads)
    return scores if mask is None else scores.masked_fill(~mask[:, None, None, :], _NOTHING)


def _divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """`KL(softmax(teacher) || softmax(student))` over the last dimension, without that dimension."""
    log_student = functional.log_softmax(student, dim=-1)
    log_teacher = functional.log_softmax(teacher, dim=-1)
    return functional.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)


def _mean_of_real(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(B,) means of (B, S) values over each example's real tokens."""
    if mask is None:
        return values.mean(1)
    return values.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
