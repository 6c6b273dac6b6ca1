"""Exercises: a reader's function runs in a process with limits, and is compared with ours.

draw      random inputs that can be made smaller       compare   where two values differ
process   the process, its limits and its end          child     what runs in it
guards    limits of files, network, time and memory    wire      values between the processes
grade     the comparison, and the smallest counterexample
"""
