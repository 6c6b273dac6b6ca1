"""Exercises: a reader's function runs apart, with limits, and is compared with ours.

draw      random inputs that can be made smaller       compare   where two values differ
process   the process that runs it, and its end        apart     namespaces of its own, where Linux allows them
child     what runs in it, and values between the two  grade     the comparison, and the smallest counterexample
"""
