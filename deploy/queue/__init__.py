"""
What becomes of jobs that are handed in while a deployment runs?

A folder holds them, and where a job's file lies in it says how far the job is.
"""
