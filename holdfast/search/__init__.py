"""Search for the best values of fields: random, by TPE, or by ASHA.

`space` has the ranges, `method` the rules, and `log` the decisions in the store. A decision is a function of the log
before it. So a controller that was killed repeats no decision and makes no other one.
"""
