"""Rows of random operators. The canonical form writes each as a stream that counts, so they have no rule."""

from ..op_row import OpRow, rows_of

DRAWS_RULES = {
    **rows_of("rand rand_like uniform", OpRow(law="uniform")),
    **rows_of("randn randn_like normal_functional normal.float_float", OpRow(law="normal")),
    **rows_of(
        "randint randint.low randint_like randint_like.low_dtype random random.from random.to", OpRow(law="integers")
    ),
    **rows_of("randperm", OpRow(law="permutation")),
    **rows_of("multinomial", OpRow(law="classes")),
    **rows_of("bernoulli bernoulli.p", OpRow(law="bernoulli")),
    **rows_of("exponential", OpRow(law="exponential")),
}
