"""Aggregations: per-token losses into the scalar that is minimised."""

from .base import Aggregation
from .seq_mean_token_mean import SeqMeanTokenMean
from .seq_sum_const import SeqSumConst
from .token_mean import TokenMean

__all__ = ["Aggregation", "SeqMeanTokenMean", "SeqSumConst", "TokenMean"]
