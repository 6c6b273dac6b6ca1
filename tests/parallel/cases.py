"""All cases of sequence parallelism, in the order in which the ranks run them: one start of processes for all."""

import attention_cases
import conduct_cases
import model_cases
import statistics_cases

# The last of conduct_cases leaves ranks with connections that are closed.
CASES = attention_cases.CASES | statistics_cases.CASES | model_cases.CASES | conduct_cases.CASES
