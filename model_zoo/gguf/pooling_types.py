"""`pooling_type` of model files: how an embedding model pools the states of a text.

CLS: the state of the first token; LAST: of the last one; RANK: a reranker, whose head computes a
score from the state of the first token; NONE: not an embedding model.
"""

NONE, MEAN, CLS, LAST, RANK = range(5)
